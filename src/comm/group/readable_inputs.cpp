#include "comm/group/readable_inputs.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include "shoal/error.h"

namespace shoal {
namespace {

bool has_bit(const at::Tensor& tensor) {
  return tensor.is_conj() || tensor.is_neg();
}

[[noreturn]] void refuse_bit(const Call& call) {
  throw UsageError(
      fmt::format("{}: a tensor has its conjugate or negative bit set, as torch::conj() returns it, and the call would "
                  "write to its memory: pass tensor.resolve_conj().resolve_neg()",
                  call.describe()));
}

bool writes_inputs(const Call& call, int rank) {
  return call.op == Op::all_reduce || call.op == Op::reduce || call.op == Op::recv ||
         (call.op == Op::broadcast && call.peer != rank);
}

void resolve_bits(Call& call, int rank) {
  for (const auto& output : call.outputs) {
    if (has_bit(output)) refuse_bit(call);
  }
  for (auto& input : call.inputs) {
    if (!has_bit(input)) continue;
    if (writes_inputs(call, rank)) refuse_bit(call);
    const c10::NoGradGuard no_grad;
    input = input.detach().resolve_conj().resolve_neg();
  }
}

uintptr_t address_of(const at::Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
}

// Tensors without memory (of the meta device, of a dry run) share none.
bool overlap(const at::Tensor& a, const at::Tensor& b) {
  const auto begin_of_a = address_of(a), begin_of_b = address_of(b);
  return begin_of_a < begin_of_b + b.nbytes() && begin_of_b < begin_of_a + a.nbytes() && a.storage().data() != nullptr;
}

void copy(at::Tensor& input) {
  const c10::NoGradGuard no_grad;
  input = input.detach().clone();
}

void copy_overwritten(Call& call, int rank, int size) {
  const bool gathers = call.op == Op::all_gather || call.op == Op::gather;
  if (!gathers && call.op != Op::reduce_scatter && call.op != Op::scatter) return;
  if (call.inputs.empty() || call.outputs.empty()) return;  // not the root
  const auto& parts = gathers ? call.outputs : call.inputs;
  const auto own = gathers ? call.inputs[0] : call.outputs[0];
  if (parts.size() == 1) {
    const auto place = address_of(parts[0]) + parts[0].nbytes() / static_cast<size_t>(size) * static_cast<size_t>(rank);
    if (address_of(own) != place && overlap(parts[0], own)) copy(call.inputs[0]);
    return;
  }
  for (size_t part = 0; part < parts.size(); ++part) {
    if (!overlap(parts[part], own)) continue;
    const bool in_place = part == static_cast<size_t>(rank) && address_of(parts[part]) == address_of(own) &&
                          parts[part].nbytes() == own.nbytes();
    if (in_place) continue;
    copy(call.inputs[gathers ? 0 : part]);
    if (gathers) return;
  }
}

}  // namespace

void make_readable(Call& call, int rank, int size) {
  resolve_bits(call, rank);
  copy_overwritten(call, rank, size);
}

}  // namespace shoal
