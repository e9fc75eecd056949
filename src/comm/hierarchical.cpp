#include "comm/hierarchical.h"

#include <torch/utils.h>

#include <algorithm>
#include <deque>
#include <map>
#include <mutex>

#include "comm/reduce_kernels.h"

namespace shoal {
namespace {

using Tensors = std::vector<at::Tensor>;
using SteadyClock = std::chrono::steady_clock;

enum class Channel { up, across, down, flat };

// A step of an operation: one or several calls on one channel, then some arithmetic.
struct Stage {
  Channel channel;
  std::vector<Call> calls;
  std::function<void()> then;
};

// One operation as a chain of stages. Used under its transport's lock only.
struct Chain {
  std::deque<Stage> waiting;
  std::vector<std::shared_ptr<TransportWork>> running;
  std::function<void()> then;
  std::exception_ptr failure;

  bool finished() const { return waiting.empty() && running.empty(); }
  bool over() const { return finished() || failure; }
  bool will_use(Channel channel) const {
    return std::any_of(waiting.begin(), waiting.end(), [&](const Stage& stage) { return stage.channel == channel; });
  }
};

class Hierarchical;

class ChainWork : public TransportWork {
 public:
  ChainWork(std::shared_ptr<Hierarchical> transport, std::shared_ptr<Chain> chain)
      : transport_(std::move(transport)), chain_(std::move(chain)) {}
  bool done() override;
  bool wait_for(Milliseconds slice, Milliseconds remaining) override;

 private:
  std::shared_ptr<Hierarchical> transport_;
  std::shared_ptr<Chain> chain_;
};

class Hierarchical : public Transport, public std::enable_shared_from_this<Hierarchical> {
 public:
  explicit Hierarchical(HierarchicalParts parts) : parts_(std::move(parts)) {}

  std::string name() const override { return "host+" + parts_.across->name(); }
  bool joins_threads() const override { return true; }
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options) override {
    return parts_.up->allocate(numel, options);
  }

  std::unique_ptr<TransportWork> issue(const Call& call) override {
    if (call.op == Op::send || call.op == Op::recv) return issue_message(call);
    auto chain = std::make_shared<Chain>();
    plan(call, *chain);
    {
      const std::lock_guard lock(mutex_);
      chains_.push_back(chain);
    }
    advance();
    return std::make_unique<ChainWork>(shared_from_this(), std::move(chain));
  }

  // Operations pass every channel in the order of the calls, so that all its ranks see the same order.
  void advance() {
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < chains_.size(); ++i) {
      auto& chain = *chains_[i];
      if (chain.failure) continue;
      try {
        while (settle(chain) && !chain.waiting.empty() && may_start(i)) start(chain);
      } catch (...) {
        chain.failure = std::current_exception();
      }
    }
    std::erase_if(chains_, [](const auto& chain) { return chain->over(); });
  }

  bool is_over(const Chain& chain) {
    const std::lock_guard lock(mutex_);
    return chain.over();
  }
  // What the chain waits for now, if anything.
  std::shared_ptr<TransportWork> running(const Chain& chain) {
    const std::lock_guard lock(mutex_);
    return chain.running.empty() ? nullptr : chain.running.front();
  }

 private:
  // Messages wait for nothing but their peer.
  std::unique_ptr<TransportWork> issue_message(const Call& call) {
    const auto [host, local] = grid().place[call.peer];
    if (host != grid().host) return parts_.flat->issue(call);
    auto inside = make(call, call.op, call.inputs, {}, local);
    inside.tag = call.tag;
    return parts_.up->issue(inside);
  }

  // Whether the running stage is over (or there is none).
  static bool settle(Chain& chain) {
    for (auto& work : chain.running) {
      if (!work->done() || !work->wait_for(Milliseconds(1), Milliseconds(1))) return false;
    }
    chain.running.clear();
    if (chain.then) std::exchange(chain.then, nullptr)();
    return true;
  }

  bool may_start(size_t index) const {
    const auto channel = chains_[index]->waiting.front().channel;
    return std::none_of(chains_.begin(), chains_.begin() + static_cast<int64_t>(index),
                        [&](const auto& earlier) { return earlier->will_use(channel); });
  }

  void start(Chain& chain) {
    auto stage = std::move(chain.waiting.front());
    chain.waiting.pop_front();
    for (const auto& call : stage.calls) {
      // Sizes are the same on all ranks of a channel, so all of them leave it out.
      if (is_empty(call)) continue;
      chain.running.push_back(transport(stage.channel).issue(call));
    }
    chain.then = std::move(stage.then);
  }

  static bool is_empty(const Call& call) {
    const auto bytes = call.bytes();
    return bytes == 0 && call.op != Op::barrier;
  }

  Transport& transport(Channel channel) {
    switch (channel) {
      case Channel::up:
        return *parts_.up;
      case Channel::across:
        return *parts_.across;
      case Channel::down:
        return *parts_.down;
      case Channel::flat:
        return *parts_.flat;
    }
    return *parts_.flat;
  }

  // The ranges of a tensor that the local ranks carry.
  Tensors ranges(const at::Tensor& tensor) const {
    const auto flat = tensor.view({-1});
    const auto line = std::max<int64_t>(1, 128 / static_cast<int64_t>(flat.element_size()));
    const auto lines = (flat.numel() + line - 1) / line;
    Tensors list;
    for (int local = 0; local < grid().local_size; ++local) {
      const auto begin = std::min(flat.numel(), lines * local / grid().local_size * line);
      const auto end = std::min(flat.numel(), lines * (local + 1) / grid().local_size * line);
      list.push_back(flat.narrow(0, begin, end - begin));
    }
    return list;
  }

  const HostGrid& grid() const { return parts_.grid; }
  int size() const { return grid().hosts * grid().local_size; }

  static Call make(const Call& like, Op op, Tensors inputs, Tensors outputs, int peer = -1) {
    Call call{.op = op,
              .reduce = like.reduce,
              .peer = peer,
              .inputs = std::move(inputs),
              .outputs = std::move(outputs),
              .label = like.label};
    // Only the sums of all hosts together can be divided.
    if (call.reduce == ReduceOp::avg) call.reduce = ReduceOp::sum;
    return call;
  }

  std::function<void()> division(const Call& call, const at::Tensor& result) const {
    if (call.reduce != ReduceOp::avg) return nullptr;
    return [result, size = size()] {
      const torch::NoGradGuard no_grad;
      result.div_(size);
    };
  }

  void plan(const Call& call, Chain& chain) {
    const auto add = [&](Channel channel, std::vector<Call> calls, std::function<void()> then = nullptr) {
      chain.waiting.push_back({channel, std::move(calls), std::move(then)});
    };
    const auto tensor = call.inputs.empty() ? at::Tensor() : call.inputs[0];
    const bool lists = call.inputs.size() > 1 || call.outputs.size() > 1;
    switch (call.op) {
      case Op::all_reduce: {
        const auto parts = ranges(tensor);
        const auto& own = parts[grid().local];
        add(Channel::up, {make(call, Op::reduce_scatter, parts, {own})});
        add(Channel::across, {make(call, Op::all_reduce, {own}, {})}, division(call, own));
        add(Channel::down, {make(call, Op::all_gather, {own}, parts)});
        return;
      }
      case Op::reduce: {
        const auto [host, local] = grid().place[call.peer];
        const auto parts = ranges(tensor);
        const auto& own = parts[grid().local];
        add(Channel::up, {make(call, Op::reduce_scatter, parts, {own})});
        const bool here = grid().host == host;
        const auto sums = at::empty({here ? grid().hosts : 0, own.numel()}, own.options());
        add(Channel::across, {make(call, Op::gather, {own}, here ? sums.unbind() : Tensors{}, host)},
            here ? summation(call, sums, own) : nullptr);
        const bool root = grid().local == local;
        if (grid().host == host) add(Channel::down, gather_ranges(call, parts, local, root));
        return;
      }
      case Op::broadcast: {
        const auto [host, local] = grid().place[call.peer];
        const auto parts = ranges(tensor);
        const auto& own = parts[grid().local];
        if (grid().host == host) add(Channel::up, scatter_ranges(call, parts, local));
        add(Channel::across, {make(call, Op::broadcast, {own}, {}, host)});
        add(Channel::down, {make(call, Op::all_gather, {own}, parts)});
        return;
      }
      case Op::reduce_scatter:
        if (!lists) return plan_reduce_scatter(call, chain);
        break;
      case Op::all_gather:
        if (!lists) return plan_all_gather(call, chain);
        break;
      case Op::barrier:
        add(Channel::up, {make(call, Op::barrier, {}, {})});
        add(Channel::across, {make(call, Op::barrier, {}, {})});
        add(Channel::down, {make(call, Op::barrier, {}, {})});
        return;
      default:
        break;
    }
    add(Channel::flat, {call});
  }

  // Ranges of unequal size from or to one local rank. The user's own tags are not negative.
  Call message(const Call& call, Op op, const at::Tensor& part, int peer) const {
    auto made = make(call, op, {part}, {}, peer);
    made.tag = -1;
    return made;
  }

  std::vector<Call> gather_ranges(const Call& call, const Tensors& parts, int local, bool root) const {
    std::vector<Call> calls;
    for (int of = 0; of < grid().local_size; ++of) {
      if (of == local || parts[of].numel() == 0) continue;
      if (grid().local == of) calls.push_back(message(call, Op::send, parts[of], local));
      if (root) calls.push_back(message(call, Op::recv, parts[of], of));
    }
    return calls;
  }

  std::vector<Call> scatter_ranges(const Call& call, const Tensors& parts, int local) const {
    std::vector<Call> calls;
    for (int of = 0; of < grid().local_size; ++of) {
      if (of == local || parts[of].numel() == 0) continue;
      if (grid().local == local) calls.push_back(message(call, Op::send, parts[of], of));
      if (grid().local == of) calls.push_back(message(call, Op::recv, parts[of], local));
    }
    return calls;
  }

  void plan_reduce_scatter(const Call& call, Chain& chain) {
    const auto& output = call.outputs[0];
    const auto numel = output.numel();
    const auto input = call.inputs[0].view({size(), numel});
    // sums[h]: what this host adds to the part of the rank at this place on host h.
    const auto sums = at::empty({grid().hosts, numel}, output.options());
    const auto received = at::empty_like(sums);
    std::vector<Call> inside;
    for (int host = 0; host < grid().hosts; ++host) {
      Tensors parts;
      for (const int rank : grid().ranks[host]) parts.push_back(input[rank]);
      inside.push_back(make(call, Op::reduce_scatter, parts, {sums[host]}));
    }
    chain.waiting.push_back({Channel::up, std::move(inside), nullptr});
    auto across = make(call, Op::all_to_all, {sums}, {received});
    chain.waiting.push_back({Channel::across, {std::move(across)}, summation(call, received, output)});
  }

  // output <- the sum (or what else is asked for) of what the hosts have, in their order.
  std::function<void()> summation(const Call& call, const at::Tensor& received, const at::Tensor& output) const {
    return [call, received, output, divide = division(call, output)] {
      reduce_in_order(output, received.unbind(), call.reduce == ReduceOp::avg ? ReduceOp::sum : call.reduce);
      if (divide) divide();
    };
  }

  void plan_all_gather(const Call& call, Chain& chain) {
    const auto numel = call.inputs[0].numel();
    const auto output = call.outputs[0].view({size(), numel});
    // column[h]: the input of the rank at this place on host h.
    const auto column = at::empty({grid().hosts, numel}, call.inputs[0].options());
    chain.waiting.push_back({Channel::across, {make(call, Op::all_gather, {call.inputs[0]}, {column})}, nullptr});
    std::vector<Call> inside;
    for (int host = 0; host < grid().hosts; ++host) {
      Tensors parts;
      for (const int rank : grid().ranks[host]) parts.push_back(output[rank]);
      inside.push_back(make(call, Op::all_gather, {column[host]}, parts));
    }
    chain.waiting.push_back({Channel::down, std::move(inside), nullptr});
  }

  HierarchicalParts parts_;
  std::mutex mutex_;
  std::deque<std::shared_ptr<Chain>> chains_;
};

bool ChainWork::done() {
  transport_->advance();
  return transport_->is_over(*chain_);
}

bool ChainWork::wait_for(Milliseconds slice, Milliseconds) {
  // Both kinds of transport are asked in turn, since neither knows when the other has something to do.
  const auto end = SteadyClock::now() + slice;
  while (!done()) {
    if (SteadyClock::now() >= end) return false;
    if (const auto running = transport_->running(*chain_)) running->wait_for(Milliseconds(1), Milliseconds(1));
  }
  if (chain_->failure) std::rethrow_exception(chain_->failure);
  return true;
}

}  // namespace

std::optional<HostGrid> make_host_grid(const std::vector<std::string>& host_of_rank, int rank) {
  HostGrid grid;
  std::map<std::string, int> numbers;
  for (int of = 0; of < static_cast<int>(host_of_rank.size()); ++of) {
    const auto host = numbers.try_emplace(host_of_rank[of], static_cast<int>(numbers.size())).first->second;
    if (host == static_cast<int>(grid.ranks.size())) grid.ranks.emplace_back();
    grid.place.emplace_back(host, static_cast<int>(grid.ranks[host].size()));
    grid.ranks[host].push_back(of);
  }
  grid.hosts = static_cast<int>(grid.ranks.size());
  grid.local_size = static_cast<int>(grid.ranks[0].size());
  std::tie(grid.host, grid.local) = grid.place[rank];
  const bool even = std::all_of(grid.ranks.begin(), grid.ranks.end(),
                                [&](const auto& ranks) { return static_cast<int>(ranks.size()) == grid.local_size; });
  if (!even || grid.local_size == 1 || grid.hosts == 1) return std::nullopt;
  return grid;
}

std::shared_ptr<Transport> make_hierarchical_transport(HierarchicalParts parts) {
  return std::make_shared<Hierarchical>(std::move(parts));
}

}  // namespace shoal
