#include "comm/hierarchical/hierarchical.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <utility>

#include "comm/hierarchical/hierarchical_plan.h"
#include "comm/reduce/reduce_kernels.h"
#include "comm/transport/empty_call.h"
#include "comm/transport/time_between_looks.h"
#include "shoal/detail/clock.h"
#include "shoal/error.h"

namespace shoal {
namespace {

// One operation as a chain of stages. Guarded by the transport's lock.
struct Chain {
  std::deque<Stage> waiting;
  std::vector<std::shared_ptr<TransportWork>> running;
  std::function<void()> then;
  std::exception_ptr failure;
  Channel channel = Channel::up;  // on which it runs

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
  bool needs(int world_rank) override;

 private:
  std::shared_ptr<Hierarchical> transport_;
  std::shared_ptr<Chain> chain_;
};

class Hierarchical : public Transport, public shm::Pollable, public std::enable_shared_from_this<Hierarchical> {
 public:
  explicit Hierarchical(HierarchicalParts parts) : parts_(std::move(parts)) { parts_.memory->attach(*this); }
  ~Hierarchical() override {
    if (!parts_.memory->is_forked_copy()) parts_.memory->detach(*this);
  }

  std::string name() const override { return "host+" + parts_.across->name(); }
  bool joins_threads() const override { return parts_.across->joins_threads(); }
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options) override {
    return parts_.up->allocate(numel, options);
  }

  void give_up(const std::string& why) override {
    for (const auto& part : {parts_.up, parts_.down, parts_.across, parts_.flat}) part->give_up(why);
  }
  void abandon(const Abandoned& why) override {
    for (const auto& part : {parts_.up, parts_.down, parts_.across, parts_.flat}) part->abandon(why);
  }
  void require_not_abandoned() override {
    for (const auto& part : {parts_.up, parts_.down, parts_.across, parts_.flat}) part->require_not_abandoned();
  }
  void await_readers() override {
    for (const auto& part : {parts_.up, parts_.flat}) part->await_readers();
  }
  void given_up_by_all() override {
    for (const auto& part : {parts_.up, parts_.down, parts_.across, parts_.flat}) part->given_up_by_all();
  }

  std::unique_ptr<TransportWork> issue(const Call& call) override {
    if (call.op == Op::send || call.op == Op::recv) return issue_message(call);
    if (reduces(call.op)) require_reducible(call);
    auto chain = std::make_shared<Chain>();
    chain->waiting = plan_stages(parts_.grid, is_empty(call) ? as_barrier(call) : call);
    {
      const std::lock_guard lock(mutex_);
      chains_.push_back(chain);
    }
    advance();
    return std::make_unique<ChainWork>(shared_from_this(), std::move(chain));
  }

  // A thread that waits for another group begins the next stages here.
  void poll() noexcept override {
    if (!advancing_) advance();
  }
  bool in_flight() override {
    const std::lock_guard lock(mutex_);
    return !chains_.empty();
  }

  // Operations pass every channel in the order of the calls, so that all ranks of the channel see the same order.
  void advance() {
    const std::lock_guard lock(mutex_);
    advancing_ = true;
    for (size_t i = 0; i < chains_.size(); ++i) {
      auto& chain = *chains_[i];
      if (chain.failure) continue;
      try {
        while (settle(chain) && !chain.waiting.empty() && may_start(i)) start(chain);
        if (!chain.over()) require_not_abandoned(chain);
      } catch (...) {
        chain.failure = std::current_exception();
      }
    }
    std::erase_if(chains_, [](const auto& chain) { return chain->over(); });
    advancing_ = false;
  }

  bool is_over(const Chain& chain) {
    const std::lock_guard lock(mutex_);
    return chain.over();
  }
  // Nobody knows what a stage that has not begun will need.
  bool needs(const Chain& chain, int world_rank) {
    const std::lock_guard lock(mutex_);
    return !chain.waiting.empty() || std::any_of(chain.running.begin(), chain.running.end(),
                                                 [&](const auto& work) { return work->needs(world_rank); });
  }
  Clock::time_point last_progress() const { return last_progress_; }
  // The first work that the chain waits for, if any.
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
  bool settle(Chain& chain) {
    while (!chain.running.empty()) {
      auto& work = chain.running.front();
      if (!work->done() || !work->wait_for(Milliseconds(1), Milliseconds(1))) return false;
      chain.running.erase(chain.running.begin());
      last_progress_ = Clock::now();
    }
    if (chain.then) std::exchange(chain.then, nullptr)();
    return true;
  }

  // Ranks of this host tell in its shared memory that they have given up, which only operations there would look at.
  void require_not_abandoned(const Chain& chain) const {
    const bool inside = chain.channel == Channel::up || chain.channel == Channel::down;
    if (chain.running.empty() || inside) return;
    parts_.up->require_not_abandoned();
    parts_.down->require_not_abandoned();
  }

  bool may_start(size_t index) const {
    const auto channel = chains_[index]->waiting.front().channel;
    return std::none_of(chains_.begin(), chains_.begin() + static_cast<int64_t>(index),
                        [&](const auto& earlier) { return earlier->will_use(channel); });
  }

  void start(Chain& chain) {
    auto stage = std::move(chain.waiting.front());
    chain.waiting.pop_front();
    chain.channel = stage.channel;
    for (const auto& call : stage.calls) {
      if (is_empty(call)) continue;  // on all ranks of the channel
      chain.running.push_back(transport(stage.channel).issue(call));
    }
    chain.then = std::move(stage.then);
    last_progress_ = Clock::now();
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
  std::atomic<bool> advancing_ = false;  // the lock is held, perhaps by the thread that asks
  std::deque<std::shared_ptr<Chain>> chains_;
  std::atomic<Clock::time_point> last_progress_ = Clock::now();  // of any operation
};

bool ChainWork::done() {
  transport_->advance();
  return transport_->is_over(*chain_);
}

bool ChainWork::needs(int world_rank) {
  return transport_->needs(*chain_, world_rank);
}

bool ChainWork::wait_for(Milliseconds slice, Milliseconds) {
  using Microseconds = std::chrono::microseconds;
  // Alternates between both kinds of transport, since neither knows when the other one can progress.
  const auto end = Clock::now() + slice;
  while (!done()) {
    const auto left = end - Clock::now();
    if (left.count() <= 0) return false;
    const auto since = transport_->last_progress();
    if (const auto running = transport_->running(*chain_)) {
      const auto pause = std::min(time_between_looks(Milliseconds(1), since), std::chrono::ceil<Milliseconds>(left));
      running->wait_for(pause, pause);
    } else {  // an earlier operation has the channel
      std::this_thread::sleep_for(std::min<Clock::duration>(time_between_looks(Microseconds(100), since), left));
    }
  }
  if (chain_->failure) std::rethrow_exception(chain_->failure);
  return true;
}

}  // namespace

std::shared_ptr<Transport> make_hierarchical_transport(HierarchicalParts parts) {
  return std::make_shared<Hierarchical>(std::move(parts));
}

}  // namespace shoal
