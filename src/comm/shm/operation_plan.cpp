#include "comm/shm/operation_plan.h"

#include <numeric>

namespace shoal::shm {
namespace {

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

OperationPlan plan_operation(const Call& call, int rank, int size, bool small) {
  using Work = OperationPlan::Work;
  const bool root = rank == call.peer;
  const bool lists = call.inputs.size() > 1 || call.outputs.size() > 1;
  OperationPlan plan;
  switch (call.op) {
    case Op::all_reduce:
    case Op::reduce:
      plan.exposed = {piece_of(call.inputs[0])};
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
      plan.exposed = parts_of(call.inputs, size);
      plan.work = Work::reduce;
      plan.part = rank;
      plan.destinations = {piece_of(call.outputs[0])};
      if (lists) plan.expected.assign(size, plan.destinations[0].bytes);
      break;
    case Op::all_gather:
      plan.exposed = {piece_of(call.inputs[0])};
      plan.work = Work::copy;
      plan.destinations = parts_of(call.outputs, size);
      if (lists) plan.expected = sizes(plan.destinations);
      break;
    case Op::broadcast:
      if (root) {
        plan.exposed = {piece_of(call.inputs[0])};
      } else {
        plan.work = Work::copy;
        plan.destinations = from_one(call.peer, piece_of(call.inputs[0]), size);
      }
      break;
    case Op::gather:
      plan.exposed = {piece_of(call.inputs[0])};
      if (root) {
        plan.work = Work::copy;
        plan.destinations = parts_of(call.outputs, size);
      }
      break;
    case Op::scatter:
      if (root) plan.exposed = parts_of(call.inputs, size);
      plan.work = Work::copy;
      plan.part = rank;
      plan.destinations = from_one(call.peer, piece_of(call.outputs[0]), size);
      break;
    case Op::all_to_all:
      plan.exposed = parts_of(call.inputs, size);
      plan.work = Work::copy;
      plan.part = rank;
      plan.destinations = parts_of(call.outputs, size);
      if (lists) plan.expected = sizes(plan.destinations);
      break;
    case Op::send:
    case Op::recv:
    case Op::barrier:
      break;
  }
  return plan;
}

}  // namespace shoal::shm
