#include "comm/backend/group_backend.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "comm/backend/backend_work.h"
#include "comm/backend/reductions.h"
#include "comm/group/coalesce.h"
#include "comm/group/group_state.h"
#include "comm/rendezvous/world_state.h"
#include "shoal/error.h"

namespace shoal {
namespace {

Tensors joined(const std::vector<Tensors>& lists) {
  Tensors all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

}  // namespace

GroupBackend::GroupBackend(const Group& group, std::chrono::milliseconds timeout)
    : Backend(group.rank(), group.size()),
      group_(group),
      options_(c10::make_intrusive<Options>("shoal", timeout)),
      pool_(std::make_shared<TensorPool>(group)) {
  auto& world = *state_of(group)->world;
  if (!world.progress) world.progress = std::make_shared<Progress>(world.memory);
  setTimeout(timeout);
  init();
}

// One call of c10d: its operations are issued one by one and finish together.
class GroupBackend::Job {
 public:
  Job(GroupBackend& backend, c10d::OpType type, const char* title)
      : backend_(backend), type_(type), title_(title), operands(title) {}

  // Options of every c10d call.
  template <class Options>
  Job& with(const Options& options) {
    if (options.timeout != c10d::kUnsetTimeout) timeout_ = options.timeout;
    waited_for_ = !options.asyncOp;
    return *this;
  }

  std::optional<std::chrono::milliseconds> timeout() const { return timeout_; }

  void issue(Op op, Tensors inputs, Tensors outputs, int64_t peer = -1, int tag = 0) {
    start({.op = op,
           .peer = static_cast<int>(peer),
           .tag = tag,
           .inputs = std::move(inputs),
           .outputs = std::move(outputs),
           .label = {},
           .timeout = timeout_});
  }
  void issue_reducing(Op op, const c10d::ReduceOp& reduce, Tensors inputs, Tensors outputs, int64_t peer = -1) {
    auto operation = from_c10d(reduce);
    if (operation == ReduceOp::sum || operation == ReduceOp::avg) {
      inputs = as_real(std::move(inputs));
      outputs = as_real(std::move(outputs));
    }
    Label label;
    // A group has no mean of integers; c10d's backends round it. A sum in their own dtype could overflow.
    if (operation == ReduceOp::avg && of_one_integer_type(inputs, outputs)) {
      operation = ReduceOp::sum;
      label.what = fmt::format("mean of {}", toString(inputs[0].scalar_type()));
      const auto result = outputs.empty() ? inputs[0] : outputs[0];
      inputs = as_int64(std::move(inputs));
      outputs = as_int64(std::move(outputs));
      const auto& sum = outputs.empty() ? inputs[0] : outputs[0];
      if (peer < 0 || peer == backend_.rank_) operands.divide_when_done(sum, backend_.size_, result);
    }
    start({.op = op,
           .reduce = operation,
           .peer = static_cast<int>(peer),
           .factor = factor_of(reduce),
           .inputs = std::move(inputs),
           .outputs = std::move(outputs),
           .label = std::move(label),
           .timeout = timeout_});
  }

  Pending end(Tensors inputs, Tensors results) {
    auto& world = *state_of(backend_.group_)->world;
    auto flight = std::make_shared<BackendFlight>(backend_.group_, std::move(works_), operands.take_kept(),
                                                  operands.take_finish());
    if (!flight->rings_bell()) flight->look();
    BackendWork::Parts parts{.type = type_,
                             .title = title_,
                             .inputs = std::move(inputs),
                             .results = std::move(results),
                             .sequence = ++backend_.issued_,
                             .rank = backend_.rank_};
    return c10::make_intrusive<BackendWork>(std::move(flight), world.progress, std::move(parts), waited_for_);
  }

 private:
  void start(Call call) { works_.push_back(shoal::issue(backend_.group_, std::move(call))); }

  GroupBackend& backend_;
  const c10d::OpType type_;
  const char* title_;
  std::optional<std::chrono::milliseconds> timeout_;
  bool waited_for_ = false;
  std::vector<shoal::Work> works_;

 public:
  Operands operands;
};

void GroupBackend::setTimeout(std::chrono::milliseconds timeout) {
  if (timeout.count() < 1) throw UsageError("the timeout of a process group must be at least 1 ms");
  options_->timeout = timeout;
  state_of(group_)->progress->timeout_ms = timeout.count();
}

c10d::ErrorType GroupBackend::getError() {
  const bool works = state_of(group_)->progress->failure.text().empty();
  return works ? c10d::ErrorType::SUCCESS : c10d::ErrorType::COMM_ERROR;
}

void GroupBackend::abort() {
  const auto& state = *state_of(group_);
  state.progress->failure.set("this rank has aborted the process group");
  // Not by a forked child, whose transport is the parent's; and in an elastic job the ranks give up groups together.
  if (state.world->is_forked_copy() || state.world->watch) return;
  const int rank = state.world->placement.rank;
  state.progress->transport->abandon({fmt::format("rank {} has aborted the process group", rank), rank});
}

void GroupBackend::shutdown() {
  const auto& state = *state_of(group_);
  state.world->progress->await_callbacks(std::chrono::seconds(2));
  if (!state.world->is_forked_copy() && state.progress->failure.text().empty())
    state.progress->transport->await_readers();
}

at::Tensor GroupBackend::allocateTensor(long size, at::TensorOptions options) {  // NOLINT(google-runtime-int)
  return pool_->allocate(size, options);
}

GroupBackend::Pending GroupBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (tensors.size() == 1 && tensors[0].layout() == at::kSparse) return allreduce_sparse(tensors, options);
  Job job(*this, c10d::OpType::ALLREDUCE, "shoal:all_reduce");
  job.with(options).operands.require_one(tensors);
  job.issue_reducing(Op::all_reduce, options.reduceOp, {job.operands.in_out(tensors[0])}, {});
  return job.end(tensors, tensors);
}

// Its steps depend on each other's results, so it ends before it returns.
GroupBackend::Pending GroupBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  Job job(*this, c10d::OpType::ALLREDUCE, "shoal:sparse_all_reduce");
  job.with(options).operands.require_one(tensors);
  const auto& tensor = tensors[0];
  const auto reduce = from_c10d(options.reduceOp);
  if (reduce != ReduceOp::sum && reduce != ReduceOp::avg) {
    job.operands.refuse("sparse tensors can be summed and averaged, not reduced with " + to_string(reduce));
  }
  if (!tensor.device().is_cpu()) job.operands.refuse("the backend shoal communicates CPU tensors");
  const bool divides = reduce == ReduceOp::avg;
  if (divides && tensor.scalar_type() == at::kBool) job.operands.refuse("avg is not defined for Bool");
  const bool rounds = divides && at::isIntegralType(tensor.scalar_type(), /*includeBool=*/false);
  std::optional<at::ScalarType> sum_in;  // the sum may be beyond the dtype's range
  if (divides && !at::isComplexType(tensor.scalar_type())) sum_in = rounds ? at::kLong : at::kDouble;
  const c10::NoGradGuard no_grad;
  const auto own = tensor.detach().coalesce();
  auto sum = all_reduce_sparse(group_, own, own.sizes(), own.values().options(), 1,
                               {.what = to_string(reduce) + " of sparse tensors"}, job.timeout(), sum_in)
                 .sum;
  if (rounds) {
    sum.div_(size_, "trunc");
  } else if (divides) {
    sum.div_(size_);
  }
  tensor.copy_(sum);  // not an alias: indices and values of a sparse tensor are replaced
  return job.end({}, tensors);
}

GroupBackend::Pending GroupBackend::allreduce_coalesced(Tensors& tensors,
                                                        const c10d::AllreduceCoalescedOptions& options) {
  Job job(*this, c10d::OpType::ALLREDUCE_COALESCED, "shoal:all_reduce");
  job.with(options);
  Tensors ready;
  for (const auto& tensor : tensors) ready.push_back(job.operands.in_out(tensor));
  for (auto& tensor : ready) job.issue_reducing(Op::all_reduce, options.reduceOp, {std::move(tensor)}, {});
  return job.end(tensors, tensors);
}

GroupBackend::Pending GroupBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  Job job(*this, c10d::OpType::REDUCE, "shoal:reduce");
  job.with(options).operands.require_one(tensors);
  job.issue_reducing(Op::reduce, options.reduceOp, {job.operands.in_out(tensors[0])}, {}, options.rootRank);
  return job.end(tensors, tensors);
}

GroupBackend::Pending GroupBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  Job job(*this, c10d::OpType::BROADCAST, "shoal:broadcast");
  job.with(options).operands.require_one(tensors);
  job.issue(Op::broadcast, {job.operands.in_out(tensors[0])}, {}, options.rootRank);
  return job.end(tensors, tensors);
}

GroupBackend::Pending GroupBackend::allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  Job job(*this, c10d::OpType::ALLGATHER, "shoal:all_gather");
  job.with(options).operands.require_one(inputs);
  if (outputs.size() != 1) job.operands.refuse("takes one list of outputs");
  job.operands.require_one_per_rank(outputs[0], size_);
  job.operands.require_same_shape(outputs[0][rank_], inputs[0]);
  job.issue(Op::all_gather, {job.operands.input(inputs[0])}, job.operands.outputs(outputs[0]));
  return job.end(inputs, outputs[0]);
}

GroupBackend::Pending GroupBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                    const c10d::AllgatherOptions& options) {
  Job job(*this, c10d::OpType::_ALLGATHER_BASE, "shoal:_all_gather_base");
  job.with(options).issue(Op::all_gather, {job.operands.input(input)}, {job.operands.output(output)});
  return job.end({input}, {output});
}

// c10d has one list per rank; a group has one list per tensor.
GroupBackend::Pending GroupBackend::allgather_coalesced(Lists& outputs, Tensors& inputs,
                                                        const c10d::AllgatherOptions& options) {
  Job job(*this, c10d::OpType::ALLGATHER_COALESCED, "shoal:all_gather");
  job.with(options);
  if (outputs.size() != static_cast<size_t>(size_)) job.operands.refuse("needs a list of outputs per rank");
  for (const auto& of_rank : outputs) {
    if (of_rank.size() != inputs.size()) job.operands.refuse("every list of outputs needs one tensor per input");
  }
  Lists ready;
  for (size_t i = 0; i < inputs.size(); ++i) {
    job.operands.require_same_shape(outputs[rank_][i], inputs[i]);
    auto& list = ready.emplace_back();
    for (const auto& of_rank : outputs) list.push_back(job.operands.output(of_rank[i]));
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    job.issue(Op::all_gather, {job.operands.input(inputs[i])}, std::move(ready[i]));
  }
  return job.end(inputs, joined(outputs));
}

GroupBackend::Pending GroupBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                    const c10d::AllgatherOptions& options) {
  Job job(*this, c10d::OpType::COALESCED, "shoal:all_gather_into_tensor_coalesced");
  job.with(options);
  if (outputs.size() != inputs.size()) job.operands.refuse("needs as many outputs as inputs");
  const auto from = job.operands.inputs(inputs);
  const auto to = job.operands.outputs(outputs);
  for (size_t i = 0; i < from.size(); ++i) job.issue(Op::all_gather, {from[i]}, {to[i]});
  return job.end(inputs, outputs);
}

GroupBackend::Pending GroupBackend::reduce_scatter(Tensors& outputs, Lists& inputs,
                                                   const c10d::ReduceScatterOptions& options) {
  Job job(*this, c10d::OpType::REDUCE_SCATTER, "shoal:reduce_scatter");
  job.with(options).operands.require_one(outputs);
  if (inputs.size() != 1) job.operands.refuse("takes one list of inputs");
  job.operands.require_one_per_rank(inputs[0], size_);
  job.operands.require_same_shape(inputs[0][rank_], outputs[0]);
  job.issue_reducing(Op::reduce_scatter, options.reduceOp, job.operands.inputs(inputs[0]),
                     {job.operands.output(outputs[0])});
  return job.end(inputs[0], outputs);
}

GroupBackend::Pending GroupBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                         const c10d::ReduceScatterOptions& options) {
  Job job(*this, c10d::OpType::_REDUCE_SCATTER_BASE, "shoal:_reduce_scatter_base");
  job.with(options).issue_reducing(Op::reduce_scatter, options.reduceOp, {job.operands.input(input)},
                                   {job.operands.output(output)});
  return job.end({input}, {output});
}

GroupBackend::Pending GroupBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                    const c10d::ReduceScatterOptions& options) {
  Job job(*this, c10d::OpType::COALESCED, "shoal:reduce_scatter_tensor_coalesced");
  job.with(options);
  if (outputs.size() != inputs.size()) job.operands.refuse("needs as many outputs as inputs");
  const auto from = job.operands.inputs(inputs);
  const auto to = job.operands.outputs(outputs);
  for (size_t i = 0; i < from.size(); ++i) {
    job.issue_reducing(Op::reduce_scatter, options.reduceOp, {from[i]}, {to[i]});
  }
  return job.end(inputs, outputs);
}

GroupBackend::Pending GroupBackend::gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  Job job(*this, c10d::OpType::GATHER, "shoal:gather");
  job.with(options).operands.require_one(inputs);
  const bool root = rank_ == options.rootRank;
  if (outputs.size() != (root ? 1 : 0)) job.operands.refuse("takes a list of outputs on the root, and none elsewhere");
  if (root) {
    job.operands.require_one_per_rank(outputs[0], size_);
    job.operands.require_same_shape(outputs[0][rank_], inputs[0]);
  }
  const auto results = joined(outputs);
  job.issue(Op::gather, {job.operands.input(inputs[0])}, job.operands.outputs(results), options.rootRank);
  return job.end(inputs, results);
}

GroupBackend::Pending GroupBackend::scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) {
  Job job(*this, c10d::OpType::SCATTER, "shoal:scatter");
  job.with(options).operands.require_one(outputs);
  const bool root = rank_ == options.rootRank;
  if (inputs.size() != (root ? 1 : 0)) job.operands.refuse("takes a list of inputs on the root, and none elsewhere");
  if (root) {
    job.operands.require_one_per_rank(inputs[0], size_);
    job.operands.require_same_shape(inputs[0][rank_], outputs[0]);
  }
  const auto from = joined(inputs);
  job.issue(Op::scatter, job.operands.inputs(from), {job.operands.output(outputs[0])}, options.rootRank);
  return job.end(from, outputs);
}

GroupBackend::Pending GroupBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  Job job(*this, c10d::OpType::ALLTOALL, "shoal:all_to_all");
  job.with(options);
  job.operands.require_one_per_rank(inputs, size_);
  job.operands.require_one_per_rank(outputs, size_);
  job.operands.require_same_shape(inputs[rank_], outputs[rank_]);
  job.issue(Op::all_to_all, job.operands.inputs(inputs), job.operands.outputs(outputs));
  return job.end(inputs, outputs);
}

GroupBackend::Pending GroupBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                  std::vector<int64_t>& output_splits,
                                                  std::vector<int64_t>& input_splits,
                                                  const c10d::AllToAllOptions& options) {
  Job job(*this, c10d::OpType::ALLTOALL_BASE, "shoal:all_to_all");
  job.with(options);
  c10d::checkSplitSizes(input_splits, input, size_);
  c10d::checkSplitSizes(output_splits, output, size_);
  const auto from = job.operands.input(input);
  const auto to = job.operands.output(output);
  // Equal parts on this rank say nothing about another one's; lists are always right.
  const auto cut = [this](const at::Tensor& tensor, const std::vector<int64_t>& splits) {
    const std::vector<int64_t> equal(size_, tensor.size(0) / size_);
    return tensor.split_with_sizes(splits.empty() ? equal : splits, 0);
  };
  job.issue(Op::all_to_all, cut(from, input_splits), cut(to, output_splits));
  return job.end({input}, {output});
}

GroupBackend::Pending GroupBackend::send(Tensors& tensors, int destination, int tag) {
  Job job(*this, c10d::OpType::SEND, "shoal:send");
  job.operands.require_one(tensors);
  job.issue(Op::send, {job.operands.input(tensors[0])}, {}, destination, tag);
  return job.end(tensors, {});
}

GroupBackend::Pending GroupBackend::recv(Tensors& tensors, int source, int tag) {
  Job job(*this, c10d::OpType::RECV, "shoal:recv");
  job.operands.require_one(tensors);
  job.issue(Op::recv, {job.operands.output(tensors[0])}, {}, source, tag);
  return job.end(tensors, tensors);
}

GroupBackend::Pending GroupBackend::recvAnysource(Tensors& tensors, int tag) {
  Job job(*this, c10d::OpType::RECVANYSOURCE, "shoal:recvAnySource");
  job.operands.require_one(tensors);
  job.issue(Op::recv, {job.operands.output(tensors[0])}, {}, any_source, tag);
  return job.end(tensors, tensors);
}

GroupBackend::Pending GroupBackend::barrier(const c10d::BarrierOptions& options) {
  Job job(*this, c10d::OpType::BARRIER, "shoal:barrier");
  job.with(options).issue(Op::barrier, {}, {});
  return job.end({}, {});
}

// A barrier names all ranks that are missing in any case.
void GroupBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool /*wait_all_ranks*/) {
  barrier(options)->wait(Milliseconds(0));
}

c10::intrusive_ptr<c10d::Backend> make_backend(const Group& group, std::optional<std::chrono::milliseconds> timeout) {
  const std::chrono::seconds of_world(state_of(group)->world->options.timeout_seconds);
  return c10::make_intrusive<GroupBackend>(group, timeout.value_or(of_world));
}

std::optional<Group> group_of_backend(const c10::intrusive_ptr<c10d::Backend>& backend) {
  const auto* own = dynamic_cast<const GroupBackend*>(backend.get());
  return own == nullptr ? std::nullopt : std::optional(own->group());
}

}  // namespace shoal
