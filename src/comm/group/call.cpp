#include "shoal/detail/call.h"

#include <fmt/format.h>

#include <algorithm>

namespace shoal {

std::string to_string(Op op) {
  switch (op) {
    case Op::all_reduce:
      return "all_reduce";
    case Op::reduce:
      return "reduce";
    case Op::reduce_scatter:
      return "reduce_scatter";
    case Op::all_gather:
      return "all_gather";
    case Op::broadcast:
      return "broadcast";
    case Op::gather:
      return "gather";
    case Op::scatter:
      return "scatter";
    case Op::all_to_all:
      return "all_to_all";
    case Op::send:
      return "send";
    case Op::recv:
      return "recv";
    case Op::barrier:
      return "barrier";
  }
  return "unknown";
}

std::string to_string(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return "sum";
    case ReduceOp::avg:
      return "avg";
    case ReduceOp::min:
      return "min";
    case ReduceOp::max:
      return "max";
    case ReduceOp::product:
      return "product";
    case ReduceOp::band:
      return "band";
    case ReduceOp::bor:
      return "bor";
    case ReduceOp::bxor:
      return "bxor";
    case ReduceOp::premul_sum:
      return "premul_sum";
  }
  return "unknown";
}

bool reduces(Op op) {
  return op == Op::all_reduce || op == Op::reduce || op == Op::reduce_scatter;
}

namespace {
int64_t total_bytes(const std::vector<at::Tensor>& tensors) {
  int64_t bytes = 0;
  for (const auto& tensor : tensors) bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}
}  // namespace

int64_t Call::bytes() const {
  return std::max(total_bytes(inputs), total_bytes(outputs));
}

std::string Call::describe() const {
  std::string text = to_string(op);
  const auto& tensors = inputs.empty() ? outputs : inputs;
  if (!tensors.empty()) {
    int64_t numel = 0;
    for (const auto& tensor : tensors) numel += tensor.numel();
    text += fmt::format("({}{} x {})", reduces(op) ? to_string(reduce) + ", " : "", numel,
                        c10::toString(tensors.front().scalar_type()));
  }
  if (label.step >= 0) text += fmt::format(", step {}", label.step);
  if (label.bucket >= 0) text += fmt::format(", bucket {}", label.bucket);
  if (!label.what.empty()) text += ": " + label.what;
  return text;
}

}  // namespace shoal
