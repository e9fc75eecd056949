#include "shoal/group.h"

#include <ATen/ops/tensor.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>
#include <type_traits>

#include "base/rank_list.h"
#include "comm/group/no_communication.h"
#include "comm/group/pending_work.h"
#include "comm/group/readable_inputs.h"
#include "comm/group/text.h"
#include "comm/rendezvous/world_state.h"
#include "comm/transport/recording.h"
#include "memory/views.h"
#include "shoal/error.h"

namespace shoal {
namespace {

// what: a text, or a function that makes it, since valid calls must not pay for texts.
template <class What>
void require(bool condition, const Call& call, const What& what) {
  if (condition) return;
  if constexpr (std::is_invocable_v<What>) {
    throw UsageError(fmt::format("{}: {}", call.describe(), what()));
  } else {
    throw UsageError(fmt::format("{}: {}", call.describe(), what));
  }
}

// Of an exchange. The part of a list that a rank sends to itself may lie where it arrives.
bool overwrites_inputs(const Call& call, int rank) {
  auto inputs = call.inputs;
  auto outputs = call.outputs;
  if (inputs.size() > 1 && inputs.size() == outputs.size()) {
    const auto& own = inputs[static_cast<size_t>(rank)];
    const auto& arrives = outputs[static_cast<size_t>(rank)];
    if (own.const_data_ptr() == arrives.const_data_ptr() && own.nbytes() == arrives.nbytes()) {
      inputs.erase(inputs.begin() + rank);
      outputs.erase(outputs.begin() + rank);
    }
  }
  return share_memory(inputs, outputs);
}

void check(const Call& call, int rank, int size) {
  for (const auto* tensors : {&call.inputs, &call.outputs}) {
    for (const auto& tensor : *tensors) {
      require(tensor.defined() && tensor.is_contiguous(), call, "tensors must be defined and contiguous");
    }
  }
  const bool has_peer = call.op == Op::reduce || call.op == Op::broadcast || call.op == Op::gather ||
                        call.op == Op::scatter || call.op == Op::send || call.op == Op::recv;
  const bool from_any = call.op == Op::recv && call.peer == any_source;
  require(!has_peer || from_any || (call.peer >= 0 && call.peer < size), call,
          [&] { return fmt::format("rank {} is not in a group of {}", call.peer, size); });
  require(!from_any || size > 1, call, "a group of one rank has nobody to receive from");
  const bool is_message = call.op == Op::send || call.op == Op::recv;
  require(!is_message || call.peer != rank, call, "a rank cannot send to itself: copy the tensor");
  require(!is_message || call.tag >= 0, call, "the tag of a message must not be negative");
  const auto ranks = static_cast<size_t>(size);
  for (const auto* list : {&call.inputs, &call.outputs}) {
    require(list->size() <= 1 || list->size() == ranks, call, "a list of tensors needs one per rank");
  }
  const auto& first = call.inputs.empty() ? call.outputs : call.inputs;
  for (const auto* list : {&call.inputs, &call.outputs}) {
    for (const auto& tensor : *list) {
      require(tensor.scalar_type() == first[0].scalar_type(), call, [&] {
        return fmt::format("tensors differ in dtype: {} and {}", toString(first[0].scalar_type()),
                           toString(tensor.scalar_type()));
      });
      require(tensor.device() == first[0].device(), call, "tensors are on different devices");
    }
  }
  if (call.op == Op::gather || call.op == Op::scatter) {
    const bool gathers = call.op == Op::gather;
    const auto& parts = gathers ? call.outputs : call.inputs;
    require(rank != call.peer || parts.size() == ranks, call, "the root needs a list of one tensor per rank");
    const auto own = (gathers ? call.inputs : call.outputs)[0].numel();
    for (const auto& part : parts) {
      require(part.numel() == own, call, [&] {
        return fmt::format("every {} must be as large as the {}: one has {} elements, this {}",
                           gathers ? "output" : "input", gathers ? "input" : "output", part.numel(), own);
      });
    }
  }
  require(call.op != Op::all_to_all || size == 1 || !overwrites_inputs(call, rank), call,
          "input and output must not share memory");
  if (call.inputs.size() != 1 || call.outputs.size() != 1) return;
  const auto in = call.inputs[0].numel();
  const auto out = call.outputs[0].numel();
  if (call.op == Op::reduce_scatter) require(in == out * size, call, "input must be size() times the output");
  if (call.op == Op::all_gather) require(out == in * size, call, "output must be size() times the input");
  if (call.op == Op::all_to_all)
    require(in == out && in % size == 0, call, "input and output must be size() equal parts");
}

// Neither logged nor counted: it is no call of the program.
void introduce(const std::shared_ptr<GroupState>& state, const Call& call) {
  auto& transport = *state->progress->transport;
  const auto own = transport.introduction(call);
  if (!own) return;
  auto plain = std::make_shared<GroupState>(*state);
  plain->transport = state->progress->transport;
  plain->logs.clear();
  const auto counted = state->progress->issued;
  const auto all = all_gather_text(Group(std::move(plain)), *own, {-1, -1, "the first collective on a GPU"});
  state->progress->issued = counted;
  transport.introduced(call, all);
}

}  // namespace

Group::Group(std::shared_ptr<GroupState> state) : state_(std::move(state)) {}

int Group::rank() const {
  return state_->rank;
}
int Group::size() const {
  return static_cast<int>(state_->world_ranks.size());
}
const std::string& Group::name() const {
  return state_->name;
}
std::string Group::transport() const {
  return state_->transport->name();
}
int Group::world_rank(int rank) const {
  return state_->world_ranks.at(rank);
}

Work issue(const Group& group, Call call) {
  const auto& state = state_of(group);
  if (state->world->is_forked_copy()) {
    throw UsageError(
        fmt::format("group '{}' belongs to process {}, from which this one was forked, and cannot be used here: "
                    "communicate in the process that made the group (not in a DataLoader's workers), or make a group "
                    "in each rank's own process",
                    state->name, state->world->pid));
  }
  check(call, group.rank(), group.size());
  NoCommunication::check(call, group.size());
  if (state->world->withheld.load(std::memory_order_relaxed)) {
    throw UsageError(
        fmt::format("{} in a newcomer to an elastic job before its loop begins: the other ranks are in theirs, so call "
                    "in_epoch() before, or step() without a sampler",
                    call.describe()));
  }
  if (const auto ended = state->progress->ended.text(); !ended.empty()) throw GroupEnded(ended);
  // Of a group of one rank nothing is missing, whoever has ended.
  const auto& watch = state->world->watch;
  if (group.size() > 1 && watch && watch->raised()) throw CommError(watch->why());
  const auto failure = state->progress->failure.text();
  if (!failure.empty()) {
    throw CommError(fmt::format("group '{}' cannot be used after an earlier failure: {}", state->name, failure));
  }
  std::erase_if(state->progress->left_behind, [](const auto& work) { return work->done(); });
  make_readable(call, group.rank(), group.size());
  introduce(state, call);
  const CallWatch telemetry(*state, call);
  check_agreement(state, call);
  return Work(std::make_unique<PendingWork>(state, std::move(call), telemetry));
}

Work Group::all_reduce(at::Tensor tensor, ReduceOp op, Label label) const {
  return issue(
      *this,
      {.op = Op::all_reduce, .reduce = op, .inputs = {std::move(tensor)}, .outputs = {}, .label = std::move(label)});
}

std::vector<double> Group::all_reduce(std::vector<double> values, ReduceOp op, Label label) const {
  // An empty list is a call, too: ranks whose lists differ in length must hear of it.
  auto padded = values;
  padded.push_back(0);
  auto tensor = at::tensor(padded, at::kDouble);
  all_reduce(tensor, op, std::move(label)).wait();
  std::copy_n(tensor.const_data_ptr<double>(), values.size(), values.begin());
  return values;
}

double Group::all_reduce(double value, ReduceOp op, Label label) const {
  return all_reduce(std::vector<double>{value}, op, std::move(label)).front();
}

Work Group::reduce(at::Tensor tensor, int root, ReduceOp op, Label label) const {
  return issue(*this, {.op = Op::reduce,
                       .reduce = op,
                       .peer = root,
                       .inputs = {std::move(tensor)},
                       .outputs = {},
                       .label = std::move(label)});
}

Work Group::reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op, Label label) const {
  return issue(*this, {.op = Op::reduce_scatter,
                       .reduce = op,
                       .inputs = {std::move(input)},
                       .outputs = {std::move(output)},
                       .label = std::move(label)});
}

Work Group::all_gather(at::Tensor output, at::Tensor input, Label label) const {
  return issue(
      *this,
      {.op = Op::all_gather, .inputs = {std::move(input)}, .outputs = {std::move(output)}, .label = std::move(label)});
}

Work Group::broadcast(at::Tensor tensor, int root, Label label) const {
  return issue(
      *this,
      {.op = Op::broadcast, .peer = root, .inputs = {std::move(tensor)}, .outputs = {}, .label = std::move(label)});
}

Work Group::gather(std::vector<at::Tensor> outputs, at::Tensor input, int root, Label label) const {
  return issue(*this, {.op = Op::gather,
                       .peer = root,
                       .inputs = {std::move(input)},
                       .outputs = std::move(outputs),
                       .label = std::move(label)});
}

Work Group::scatter(at::Tensor output, std::vector<at::Tensor> inputs, int root, Label label) const {
  return issue(*this, {.op = Op::scatter,
                       .peer = root,
                       .inputs = std::move(inputs),
                       .outputs = {std::move(output)},
                       .label = std::move(label)});
}

Work Group::all_to_all(at::Tensor output, at::Tensor input, Label label) const {
  return issue(
      *this,
      {.op = Op::all_to_all, .inputs = {std::move(input)}, .outputs = {std::move(output)}, .label = std::move(label)});
}

Work Group::send(at::Tensor tensor, int destination, int tag, Label label) const {
  return issue(*this, {.op = Op::send,
                       .peer = destination,
                       .tag = tag,
                       .inputs = {std::move(tensor)},
                       .outputs = {},
                       .label = std::move(label)});
}

Work Group::recv(at::Tensor tensor, int source, int tag, Label label) const {
  return issue(*this, {.op = Op::recv,
                       .peer = source,
                       .tag = tag,
                       .inputs = {std::move(tensor)},
                       .outputs = {},
                       .label = std::move(label)});
}

Work Group::barrier(Label label) const {
  return issue(*this, {.op = Op::barrier, .inputs = {}, .outputs = {}, .label = std::move(label)});
}

at::Tensor Group::allocate(int64_t numel, const at::TensorOptions& options) const {
  return state_->transport->allocate(numel, options);
}

Group Group::subgroup(const std::vector<int>& ranks, std::optional<std::chrono::milliseconds> limit) const {
  const std::set<int> distinct(ranks.begin(), ranks.end());
  if (ranks.empty() || distinct.size() != ranks.size() || *distinct.begin() < 0 || *distinct.rbegin() >= size()) {
    throw UsageError(fmt::format("subgroup of ranks [{}]: they must be different and within 0 to {}",
                                 fmt::join(ranks, ", "), size() - 1));
  }
  if (distinct.count(rank()) == 0) {
    throw UsageError(fmt::format("subgroup of ranks [{}]: rank {} is not a member; only members may call subgroup()",
                                 fmt::join(ranks, ", "), rank()));
  }
  if (limit && limit->count() < 1) {
    throw UsageError(fmt::format("subgroup of ranks [{}]: its timeout must be at least 1 ms", fmt::join(ranks, ", ")));
  }
  std::vector<int> world_ranks;
  for (const int rank : ranks) world_ranks.push_back(world_rank(rank));
  const int number = state_->progress->subgroups[ranks]++;
  const auto name = fmt::format("{}[{}]#{}", state_->name, rank_list(ranks), number);
  Group group(make_group_state(state_->world, name, world_ranks, limit));
  for (const auto& log : state_->logs) group = group.recorded(log);
  return group;
}

Group Group::by_host() const {
  const auto& peers = state_->world->meeting.peers;
  const auto& own = peers[world_rank(rank())].host;
  std::vector<int> ranks;
  for (int other = 0; other < size(); ++other) {
    if (peers[world_rank(other)].host == own) ranks.push_back(other);
  }
  const auto group = static_cast<int>(ranks.size()) == size() ? *this : subgroup(ranks);
  auto copy = std::make_shared<GroupState>(*group.state_);
  copy->by_host = true;
  return Group(std::move(copy));
}

GroupStatistics Group::statistics() const {
  auto statistics = state_->progress->issued;
  statistics.waited_s = state_->progress->waited_s;
  return statistics;
}

Group Group::recorded(std::shared_ptr<CallLog> log) const {
  auto copy = std::make_shared<GroupState>(*state_);
  copy->transport = make_recording_transport(copy->transport, log, name());
  copy->logs.push_back(std::move(log));
  return Group(std::move(copy));
}

}  // namespace shoal
