#include "comm/agreement/fingerprint.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <functional>
#include <string_view>

#include "base/printable.h"

namespace shoal {
namespace {

bool has_root(Op op) {
  return op == Op::reduce || op == Op::broadcast || op == Op::gather || op == Op::scatter;
}

// Number of bytes that must be equal on all ranks; lists of parts are compared part by part instead.
uint64_t common_bytes(const Call& call) {
  switch (call.op) {
    case Op::reduce_scatter:
      return call.inputs.size() > 1 ? 0 : call.outputs[0].nbytes();
    case Op::all_gather:
      return call.outputs.size() > 1 ? 0 : call.inputs[0].nbytes();
    case Op::all_to_all:
      return call.inputs.size() > 1 || call.outputs.size() > 1 ? 0 : call.inputs[0].nbytes();
    case Op::scatter:
      return call.outputs[0].nbytes();
    case Op::barrier:
      return 0;
    default:
      return call.inputs[0].nbytes();
  }
}

}  // namespace

bool same(const Fingerprint& a, const Fingerprint& b) {
  return a.number == b.number && a.op == b.op && a.reduce == b.reduce && a.dtype == b.dtype && a.peer == b.peer &&
         a.bytes == b.bytes && a.step == b.step && a.bucket == b.bucket && a.label == b.label;
}

Fingerprint fingerprint_of(const Call& call, uint64_t number) {
  const auto& tensors = call.inputs.empty() ? call.outputs : call.inputs;
  Fingerprint print{};
  print.number = number + 1;  // so that zeroed memory does not look like the first operation
  print.op = static_cast<int32_t>(call.op);
  print.reduce = reduces(call.op) ? static_cast<int32_t>(call.reduce) : -1;
  print.dtype = tensors.empty() ? -1 : static_cast<int32_t>(tensors.front().scalar_type());
  print.peer = has_root(call.op) ? call.peer : -1;
  print.bytes = common_bytes(call);
  print.step = call.label.step;
  print.bucket = call.label.bucket;
  print.label = std::hash<std::string>()(call.label.what);
  const auto length = std::min(call.label.what.size(), text_bytes - 1);
  std::memcpy(print.text, call.label.what.data(), length);
  print.text[length] = 0;
  return print;
}

uint64_t hash_of(const Fingerprint& print) {
  return std::hash<std::string_view>()({reinterpret_cast<const char*>(&print), offsetof(Fingerprint, text)});
}

bool is_call(const Fingerprint& print) {
  if (print.op < 0 || print.op > static_cast<int32_t>(Op::barrier)) return false;
  if (print.reduce < -1 || print.reduce > static_cast<int32_t>(ReduceOp::premul_sum)) return false;
  if (print.dtype < -1 || print.dtype >= static_cast<int32_t>(c10::ScalarType::NumOptions)) return false;
  return print.dtype != static_cast<int32_t>(c10::ScalarType::Undefined);
}

std::string describe(const Fingerprint& print) {
  const auto op = static_cast<Op>(print.op);
  std::string text = to_string(op);
  if (print.dtype >= 0) {
    const auto dtype = static_cast<c10::ScalarType>(print.dtype);
    text += fmt::format("({}{} x {}{})", print.reduce >= 0 ? to_string(static_cast<ReduceOp>(print.reduce)) + ", " : "",
                        print.bytes / c10::elementSize(dtype), toString(dtype),
                        print.peer >= 0 ? fmt::format(", root {}", print.peer) : "");
  }
  if (print.step >= 0) text += fmt::format(", step {}", print.step);
  if (print.bucket >= 0) text += fmt::format(", bucket {}", print.bucket);
  if (print.text[0] != 0) text += fmt::format(": {}", printable(print.text));
  return text;
}

std::optional<std::string> find_difference(const std::vector<const Fingerprint*>& prints,
                                           const std::vector<int>& world_ranks) {
  const auto& first = *prints[0];
  for (size_t rank = 1; rank < prints.size(); ++rank) {
    if (same(first, *prints[rank])) continue;
    const bool buckets = first.bucket >= 0 && prints[rank]->bucket >= 0;
    return fmt::format(
        "ranks called different operations as #{}: rank {} called {}, rank {} called {}{}", first.number - 1,
        world_ranks[0], describe(first), world_ranks[rank], describe(*prints[rank]),
        buckets
            ? ". A rank that catches an exception and goes on calls abandon_step() of each wrapper whose forward has "
              "run and whose backward has not begun"
            : "");
  }
  return std::nullopt;
}

}  // namespace shoal
