#include "comm/shm/plan.h"

#include <numeric>

namespace shoal {
namespace {

Piece piece(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), static_cast<int64_t>(tensor.nbytes())};
}

// Equal parts of one tensor, or one tensor per rank.
std::vector<Piece> parts(const std::vector<at::Tensor>& tensors, int size) {
  std::vector<Piece> list;
  if (tensors.size() == 1) {
    const auto whole = piece(tensors[0]);
    const auto bytes = whole.bytes / size;
    for (int rank = 0; rank < size; ++rank) list.push_back({whole.data + rank * bytes, bytes});
  } else {
    for (const auto& tensor : tensors) list.push_back(piece(tensor));
  }
  return list;
}

std::vector<int64_t> sizes(const std::vector<Piece>& pieces) {
  std::vector<int64_t> list;
  for (const auto& part : pieces) list.push_back(part.bytes);
  return list;
}

// Only `source` has data for this rank.
std::vector<Piece> from_one(int source, const Piece& destination, int size) {
  std::vector<Piece> list(size);
  list[source] = destination;
  return list;
}

}  // namespace

Plan make_plan(const Call& call, int rank, int size, bool small) {
  using Work = Plan::Work;
  const bool root = rank == call.peer;
  const bool lists = call.inputs.size() > 1 || call.outputs.size() > 1;
  Plan plan;
  switch (call.op) {
    case Op::all_reduce:
    case Op::reduce:
      plan.exposed = {piece(call.inputs[0])};
      if (!small) {
        plan.work = Work::reduce_slices;
        plan.targets = {call.peer};
        if (call.op == Op::all_reduce) {
          plan.targets.resize(size);
          std::iota(plan.targets.begin(), plan.targets.end(), 0);
        }
      } else if (call.op == Op::all_reduce || root) {
        plan.work = Work::reduce;
        plan.destinations = plan.exposed;
      }
      break;
    case Op::reduce_scatter:
      plan.exposed = parts(call.inputs, size);
      plan.work = Work::reduce;
      plan.part = rank;
      plan.destinations = {piece(call.outputs[0])};
      if (lists) plan.expected.assign(size, plan.destinations[0].bytes);
      break;
    case Op::all_gather:
      plan.exposed = {piece(call.inputs[0])};
      plan.work = Work::copy;
      plan.destinations = parts(call.outputs, size);
      if (lists) plan.expected = sizes(plan.destinations);
      break;
    case Op::broadcast:
      if (root) {
        plan.exposed = {piece(call.inputs[0])};
      } else {
        plan.work = Work::copy;
        plan.destinations = from_one(call.peer, piece(call.inputs[0]), size);
      }
      break;
    case Op::gather:
      plan.exposed = {piece(call.inputs[0])};
      if (root) {
        plan.work = Work::copy;
        plan.destinations = parts(call.outputs, size);
      }
      break;
    case Op::scatter:
      if (root) plan.exposed = parts(call.inputs, size);
      plan.work = Work::copy;
      plan.part = rank;
      plan.destinations = from_one(call.peer, piece(call.outputs[0]), size);
      break;
    case Op::all_to_all:
      plan.exposed = parts(call.inputs, size);
      plan.work = Work::copy;
      plan.part = rank;
      plan.destinations = parts(call.outputs, size);
      if (lists) plan.expected = sizes(plan.destinations);
      break;
    case Op::send:
    case Op::recv:
    case Op::barrier:
      break;
  }
  return plan;
}

}  // namespace shoal
