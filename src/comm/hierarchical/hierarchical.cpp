#include "comm/hierarchical/hierarchical.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "comm/hierarchical/hierarchical_plan.h"
#include "shoal/error.h"

namespace shoal {
namespace {

using SteadyClock = std::chrono::steady_clock;

// One operation as a chain of stages. Guarded by the transport's lock.
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

  void give_up(const std::string& why) override {
    for (const auto& part : {parts_.up, parts_.down, parts_.across, parts_.flat}) part->give_up(why);
  }
  void given_up_by_all() override {
    for (const auto& part : {parts_.up, parts_.down, parts_.across, parts_.flat}) part->given_up_by_all();
  }

  std::unique_ptr<TransportWork> issue(const Call& call) override {
    if (call.op == Op::send || call.op == Op::recv) return issue_message(call);
    auto chain = std::make_shared<Chain>();
    chain->waiting = plan_stages(parts_.grid, call);
    {
      const std::lock_guard lock(mutex_);
      chains_.push_back(chain);
    }
    advance();
    return std::make_unique<ChainWork>(shared_from_this(), std::move(chain));
  }

  // Operations pass every channel in the order of the calls, so that all ranks of the channel see the same order.
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
  // The work that the chain waits for, if any.
  std::shared_ptr<TransportWork> running(const Chain& chain) {
    const std::lock_guard lock(mutex_);
    return chain.running.empty() ? nullptr : chain.running.front();
  }

 private:
  // Messages wait for their peer only, so they need no chain.
  std::unique_ptr<TransportWork> issue_message(const Call& call) {
    if (call.peer == any_source) {
      throw UsageError("receive from any source: supported among ranks of one host, and over tcp (transport tcp)");
    }
    const auto [host, local] = parts_.grid.place[call.peer];
    if (host != parts_.grid.host) return parts_.flat->issue(call);
    auto inside = call;
    inside.peer = local;
    return parts_.up->issue(inside);
  }

  // Whether the running stage has finished (or there is none).
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
      // Sizes are the same on all ranks of a channel, so all of them skip the call.
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

  HierarchicalParts parts_;
  std::mutex mutex_;
  std::deque<std::shared_ptr<Chain>> chains_;
};

bool ChainWork::done() {
  transport_->advance();
  return transport_->is_over(*chain_);
}

bool ChainWork::wait_for(Milliseconds slice, Milliseconds) {
  // Alternates between both kinds of transport, since neither knows when the other one can progress.
  const auto end = SteadyClock::now() + slice;
  while (!done()) {
    if (SteadyClock::now() >= end) return false;
    if (const auto running = transport_->running(*chain_)) running->wait_for(Milliseconds(1), Milliseconds(1));
  }
  if (chain_->failure) std::rethrow_exception(chain_->failure);
  return true;
}

}  // namespace

std::shared_ptr<Transport> make_hierarchical_transport(HierarchicalParts parts) {
  return std::make_shared<Hierarchical>(std::move(parts));
}

}  // namespace shoal
