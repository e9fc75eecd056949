#include "engine/sharded/second_owner_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "engine/changes/changed_values.h"
#include "shoal/error.h"

namespace shoal {
namespace {

constexpr uint64_t odd = 0x9e3779b97f4a7c15U;

uint64_t with_bits(uint64_t digest, uint64_t bits) {
  return (digest ^ bits) * odd + 1;
}

// Of an element in row-major order, whatever the strides: those of two owners' state may differ.
uint64_t bits_at(const at::Tensor& values, int64_t place) {
  int64_t offset = 0;
  for (int64_t dim = values.dim(); dim-- > 0;) {
    offset += place % values.size(dim) * values.stride(dim);
    place /= values.size(dim);
  }
  uint64_t bits = 0;
  const auto size = values.element_size();
  std::memcpy(&bits, static_cast<const char*>(values.const_data_ptr()) + offset * size,
              std::min(static_cast<size_t>(size), sizeof bits));
  return bits;
}

}  // namespace

void refuse_unequal_updates() {
  throw DisagreeError(
      "Elastic: the second function of step() has called the optimizer's step() on some ranks and not on others: call "
      "it on all of them, or on none, as where all skip a step; start the job again from its last checkpoint");
}

void SecondOwnerCheck::add_element(int owner, const at::Tensor& values) {
  auto& digest = shards[owner];
  if (values.numel() == 0) return;
  const auto place = (static_cast<uint64_t>(updates) * odd >> 16) % static_cast<uint64_t>(values.numel());
  digest = with_bits(digest, bits_at(values, static_cast<int64_t>(place)));
}

void SecondOwnerCheck::add_state(int owner, const NamedState& state) {
  for (const auto& [field, tensor] : state.tensors) add_element(owner, tensor);
  auto& digest = shards[owner];
  for (const auto& [field, number] : state.numbers) digest = with_bits(digest, std::bit_cast<uint64_t>(number));
}

void SecondOwnerCheck::add_gradient(int owner, const at::Tensor& gradient) {
  auto& digest = (*gradients)[owner];
  digest = with_bits(digest, gradient.defined() ? digest_of(gradient) : 0);
}

// Each number, and minus it, for one maximum over the ranks.
SecondOwnerCheck::Answer SecondOwnerCheck::ask(const Group& group, const std::vector<int>& owners,
                                               const Label& label) const {
  const auto ranks = owners.size();
  std::vector<double> own(1 + 2 * (2 + (gradients ? 2 : 1) * ranks), -std::numeric_limits<double>::infinity());
  own[0] = replaced ? 2 + group.rank() : asks ? 1 : 0;
  const auto show = [&](size_t place, double value) {
    own[1 + 2 * place] = value;
    own[2 + 2 * place] = -value;
  };
  const auto in_53_bits = [](uint64_t digest) { return static_cast<double>(digest >> 11); };  // which a double has
  show(0, in_53_bits(options));
  show(1, static_cast<double>(updates));
  for (const auto& [owner, digest] : shards) show(2 + static_cast<size_t>(owner), in_53_bits(digest));
  if (gradients) {
    for (const auto& [owner, digest] : *gradients) show(2 + ranks + static_cast<size_t>(owner), in_53_bits(digest));
  }
  const auto most = group.all_reduce(own, ReduceOp::max, label);
  if (most[0] >= 2) {
    throw UsageError(fmt::format(
        "Elastic: rank {} has loaded or replaced the state of the sharded optimizer, which is not supported "
        "here: load it before Elastic is constructed",
        most[0] - 2));
  }
  const auto differs = [&](size_t place) {
    const bool none = std::isinf(most[1 + 2 * place]);  // a rank without elements
    return !none && most[1 + 2 * place] != -most[2 + 2 * place];
  };
  if (differs(1)) refuse_unequal_updates();
  if (differs(0)) {
    throw DisagreeError(
        "ranks have different options of the optimizer (learning rate, weight decay or others): change them alike on "
        "every rank before the step");
  }
  Answer answer{.asked = most[0] != 0};
  for (size_t rank = ranks; rank-- > 0;) {
    if (gradients && differs(2 + ranks + rank)) answer.differs = static_cast<int>(rank);
  }
  for (size_t rank = 0; rank < ranks; ++rank) {
    if (!differs(2 + rank)) continue;
    throw DisagreeError(fmt::format(
        "rank {} and rank {}, which own the same shards in an elastic job, have different values of them or "
        "optimizer state: change parameters between two steps alike on all ranks, leave the state to the "
        "optimizer, and load checkpoints before Elastic is constructed; hosts whose CPUs have other vector "
        "instructions round in other ways: take hosts of one kind, or the same ATEN_CPU_CAPABILITY on all",
        rank, owners[rank]));
  }
  return answer;
}

}  // namespace shoal
