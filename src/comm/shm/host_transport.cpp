#include "comm/shm/host_transport.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <mutex>
#include <new>
#include <stdexcept>
#include <thread>

#include "comm/reduce/reduce_kernels.h"
#include "comm/rendezvous/liveness.h"
#include "comm/rendezvous/while_waiting.h"
#include "comm/rendezvous/world_state.h"
#include "comm/shm/mailbox.h"
#include "comm/shm/operation.h"
#include "comm/shm/wait.h"
#include "comm/store/authenticated_store.h"
#include "comm/store/store_gather.h"
#include "shoal/detail/clock.h"
#include "shoal/error.h"

namespace shoal::shm {
namespace {

class SharedMemoryTransport;

class HostWork : public TransportWork {
 public:
  HostWork(std::shared_ptr<SharedMemoryTransport> transport, std::shared_ptr<Operation> operation)
      : transport_(std::move(transport)), operation_(std::move(operation)) {}
  HostWork(std::shared_ptr<SharedMemoryTransport> transport, std::shared_ptr<Message> message)
      : transport_(std::move(transport)), message_(std::move(message)) {}

  bool done() override;
  bool wait_for(Milliseconds slice, Milliseconds remaining) override;
  std::string waits_for() override;
  int source() const override { return message_ ? message_->source : any_source; }

 private:
  bool finished() const { return operation_ ? operation_->finished() : message_->finished.load(); }

  std::shared_ptr<SharedMemoryTransport> transport_;
  std::shared_ptr<Operation> operation_;
  std::shared_ptr<Message> message_;
};

class SharedMemoryTransport : public Transport,
                              public Pollable,
                              public std::enable_shared_from_this<SharedMemoryTransport> {
 public:
  SharedMemoryTransport(HostGroup group, std::vector<int> world_ranks, bool may_spin, std::byte* own_block)
      : group_(std::move(group)),
        world_ranks_(std::move(world_ranks)),
        may_spin_(may_spin),
        own_block_(own_block),
        mailboxes_(group_, world_ranks_) {
    group_.memory->attach(*this);
  }

  ~SharedMemoryTransport() override {
    if (group_.memory->is_forked_copy()) return;  // the memory is the parent's
    group_.memory->detach(*this);
    SharedMemoryTransport::await_readers();
    auto* memory = group_.memory.get();
    auto* block = &group_.control.block();
    auto buffers = mailboxes_.buffers();
    if (group_.stage != nullptr) buffers.push_back(group_.stage);
    // A slower peer may still read or write these.
    auto tensors = mailboxes_.unread();
    for (const auto& operation : operations_) {
      const auto& call = operation->call();
      tensors.insert(tensors.end(), call.inputs.begin(), call.inputs.end());
      tensors.insert(tensors.end(), call.outputs.begin(), call.outputs.end());
    }
    const auto unread = [memory, buffers, tensors] {
      for (auto* buffer : buffers) memory->free(buffer);
    };
    const auto own_unread = [memory, own = own_block_] { memory->free(own); };
    if (given_up_) {
      // The block may be another rank's, and freed: its counters are of no use any more.
      retire_unread(unread);
      if (own_block_ != nullptr) retire_unread(own_unread);
      return;
    }
    block->readers.fetch_sub(1);
    const auto try_free = [block, unread] {
      if (block->readers.load() != 0) return false;
      unread();
      block->users.fetch_sub(1);
      return true;
    };
    memory->retire(try_free, unread);
    if (own_block_ == nullptr) return;
    const auto try_free_own = [block, own_unread] {
      if (block->users.load() != 0) return false;
      own_unread();
      return true;
    };
    memory->retire(try_free_own, own_unread);
  }

  void give_up(const std::string& why) override {
    {
      const std::lock_guard lock(mutex_);
      given_up_ = true;
      failure_ = std::make_exception_ptr(CommError(why));
    }
    group_.memory->wake();
  }

  void require_not_abandoned() override {
    const auto& block = group_.control.block();
    const auto fault = block.fault.load(std::memory_order_acquire);
    if (fault == ControlBlock::disagreed) throw DisagreeError(block.fault_text);
    if (fault == ControlBlock::abandoned) throw Abandoned(block.fault_text, block.culprit);
  }

  void abandon(const Abandoned& why) override {
    {
      const std::lock_guard lock(mutex_);
      if (!failure_) failure_ = std::make_exception_ptr(why);
      tell_others(ControlBlock::abandoned, why.what(), why.culprit());
    }
    group_.memory->wake();
    await_users();
  }

  void given_up_by_all() override {
    const std::lock_guard lock(mutex_);
    given_up_by_all_ = true;
    operations_.clear();
    announced_ = 0;
  }

  std::string name() const override { return "host"; }
  bool checks_agreement() const override { return true; }

  std::unique_ptr<TransportWork> issue(const Call& call) override {
    check(call);
    std::unique_ptr<TransportWork> work;
    {
      const std::lock_guard lock(mutex_);
      if (call.op == Op::send || call.op == Op::recv) {
        work = std::make_unique<HostWork>(shared_from_this(), mailboxes_.start(call));
      } else {
        auto operation = std::make_shared<Operation>(group_, call, issued_++, world_ranks_);
        operations_.push_back(operation);
        work = std::make_unique<HostWork>(shared_from_this(), std::move(operation));
      }
    }
    poll();
    return work;
  }

  at::Tensor allocate(int64_t numel, const at::TensorOptions& options) override {
    if (!options.device().is_cpu()) return Transport::allocate(numel, options);
    auto memory = group_.memory;
    auto* data = memory->allocate(static_cast<size_t>(numel) * options.dtype().itemsize());
    return at::from_blob(
        data, {numel}, [memory, data](void*) { memory->free(data); }, options);
  }

  void poll() noexcept override {
    // Blocks for the lock, because progress made by its holder rings no bell, and this thread may be about to sleep.
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    try {
      advance();
    } catch (const DisagreeError& error) {
      failure_ = std::current_exception();
      tell_others(ControlBlock::disagreed, error.what(), -1);
    } catch (...) {
      failure_ = std::current_exception();  // a peer has gone; the others detect that by themselves
    }
  }

  bool in_flight() override {
    const std::lock_guard lock(mutex_);
    return failure_ == nullptr && (!operations_.empty() || mailboxes_.in_flight());
  }

  // A message is sent once it lies in this process's memory, which ends with the process: a program may end right after
  // its last message.
  void await_readers() override {
    const auto deadline = Clock::now() + std::chrono::seconds(10);
    const auto settled = [this] {
      const std::lock_guard lock(mutex_);
      return failure_ != nullptr || mailboxes_.all_read();
    };
    while (!settled() && Clock::now() < deadline) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  // Rethrows the error that stopped the group.
  void check_failure() {
    std::unique_lock lock(mutex_);
    if (!failure_) return;
    const auto failure = failure_;
    lock.unlock();
    await_users();
    std::rethrow_exception(failure);
  }
  bool failed() {
    const std::lock_guard lock(mutex_);
    return failure_ != nullptr;
  }

  bool wait(std::chrono::nanoseconds limit, const std::function<bool()>& finished) {
    return wait_until(*group_.memory, may_spin_, limit,
                      [&] { return finished() || failed() || group_.memory->interrupted(); });
  }

  std::vector<int> missing(const Operation& operation) {
    const std::lock_guard lock(mutex_);
    std::vector<int> ranks;
    for (const int rank : operation.missing()) ranks.push_back(world_ranks_[rank]);
    return ranks;
  }

 private:
  // Waits until no rank uses the tensors of others any more, for 2 s at most: one may be stopped. One that has ended is
  // not waited for.
  void await_users() {
    const auto deadline = Clock::now() + std::chrono::seconds(2);
    const auto used = [this](int rank) {
      const std::lock_guard lock(mutex_);
      return !given_up_ && group_.control.use(rank).in_place.load() != 0;  // given up, the block may be freed
    };
    for (int rank = 0; rank < group_.size; ++rank) {
      const auto& peer = group_.peers[rank];
      while (peer && used(rank) && !peer->gone() && Clock::now() < deadline) {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
    }
  }

  void retire_unread(const std::function<void()>& unread) {
    if (given_up_by_all_) {
      unread();
    } else {
      group_.memory->retire([] { return false; }, unread);
    }
  }

  void check(const Call& call) const {
    for (const auto* tensors : {&call.inputs, &call.outputs}) {
      for (const auto& tensor : *tensors) {
        if (tensor.is_cpu()) continue;
        throw UsageError(
            fmt::format("{}: the host transport supports CPU tensors only, but a tensor is on {}; move it to the CPU",
                        call.describe(), tensor.device().str()));
      }
    }
    if (reduces(call.op)) require_reducible(call);
  }

  void advance() {
    require_not_abandoned();
    for (; announced_ < operations_.size() && operations_[announced_]->announce(); ++announced_) {
    }
    bool first = true;
    for (size_t i = 0; i < announced_; ++i) {
      operations_[i]->advance(first);
      first = first && operations_[i]->executed();
    }
    while (announced_ > 0 && operations_.front()->finished()) {
      operations_.pop_front();
      --announced_;
    }
    mailboxes_.advance();
  }

  void tell_others(ControlBlock::Fault fault, const std::string& text, int culprit) {
    auto& block = group_.control.block();
    uint32_t none = ControlBlock::none;
    if (!block.fault.compare_exchange_strong(none, ControlBlock::being_written)) return;
    std::strncpy(block.fault_text, text.c_str(), sizeof block.fault_text - 1);
    block.culprit = culprit;
    block.fault.store(fault);
    group_.ring_others();
  }

  HostGroup group_;
  const std::vector<int> world_ranks_;
  const bool may_spin_;
  std::byte* const own_block_;  // set on the rank that allocated the control block

  std::mutex mutex_;  // guards what follows; waits for other groups progress this group's operations, too
  std::deque<std::shared_ptr<Operation>> operations_;
  size_t announced_ = 0;
  uint64_t issued_ = 0;
  Mailboxes mailboxes_;
  std::exception_ptr failure_;
  bool given_up_ = false;
  bool given_up_by_all_ = false;
};

bool HostWork::done() {
  transport_->poll();
  return finished() || transport_->failed();
}

bool HostWork::wait_for(Milliseconds slice, Milliseconds) {
  // A thread that progresses all groups comes here for work that is over, and must not do so again.
  if (finished()) return true;
  transport_->check_failure();
  if (!transport_->wait(slice, [this] { return finished(); })) return false;
  if (!finished()) transport_->check_failure();
  return finished();
}

std::string HostWork::waits_for() {
  if (!operation_) return "";
  const auto ranks = transport_->missing(*operation_);
  return ranks.empty() ? "" : fmt::format("rank(s) {} have not called it", fmt::join(ranks, ", "));
}

std::byte* open_block(const WorldState& world, PeerMemory& memory, const Place& place,
                      const std::vector<int>& world_ranks) {
  try {
    return memory.at(place);
  } catch (const std::runtime_error& error) {
    if (const auto fault = world.liveness->check(world_ranks)) throw CommError(fault->text);
    throw CommError(fmt::format("rank {}'s shared memory cannot be opened: {}", world_ranks[0], error.what()));
  }
}

// The others can open rank 0's memory only while rank 0 lives, and a program may end right after it has begun.
void await_others(const WorldState& world, const ControlLayout& control, const std::string& name,
                  const std::vector<int>& world_ranks, Milliseconds limit) {
  const auto deadline = Clock::now() + limit;
  WhileWaiting while_waiting(world.options.while_waiting);
  while (control.block().opened.load() < world_ranks.size()) {
    if (world.watch && world.watch->raised()) throw CommError(world.watch->why());
    if (const auto fault = world.liveness->check(world_ranks)) throw CommError(fault->text);
    while_waiting.look();
    if (Clock::now() > deadline) {
      throw CommError(fmt::format("not all ranks opened the shared memory of group '{}' within {} s", name,
                                  std::chrono::duration<double>(limit).count()));
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

}  // namespace

HostTransport make_host_transport(const WorldState& world, const std::string& name, int rank,
                                  const std::vector<int>& world_ranks, Milliseconds limit) {
  const auto& peers = world.meeting.peers;
  const auto& own = peers[world_ranks[rank]];
  for (const int other : world_ranks) {
    if (peers[other].host != own.host) return {nullptr, fmt::format("rank {} is on another host", other)};
  }
  const int size = static_cast<int>(world_ranks.size());
  std::vector<std::shared_ptr<PeerMemory>> memories(size);
  std::byte* own_block = nullptr;
  std::string line;
  try {
    if (!world.memory) throw std::runtime_error("this system gave no shared memory");
    for (int other = 0; other < size; ++other) {
      if (other != rank) memories[other] = world.memory->peer(peers[world_ranks[other]].page);
    }
    if (rank == 0) {
      own_block = world.memory->allocate(ControlLayout::bytes(size));
      auto& block = ControlLayout(own_block, size).block();
      block.readers = static_cast<uint32_t>(size);
      block.users = static_cast<uint32_t>(size);
    }
    const auto place = own_block == nullptr ? Place{} : *world.memory->locate(own_block, 1);
    line = fmt::format("{} {} ", place.arena, place.offset);
  } catch (const std::exception& error) {
    line = fmt::format("- - {}", error.what());
  }
  std::byte* base = nullptr;
  try {
    const auto topic = "host/" + name;
    const auto lines = store_gather(world, topic, world_ranks, rank, line, limit);
    for (int other = 0; other < size; ++other) {
      if (lines[other][0] != '-') continue;
      if (own_block != nullptr) world.memory->free(own_block);
      return {nullptr, fmt::format("rank {}: {}", world_ranks[other], lines[other].substr(4))};
    }
    const auto key = gathered_key(world, topic, 0);
    const auto offset = lines[0].substr(lines[0].find(' ') + 1);
    const Place place{number_in<uint32_t>(lines[0], key), number_in<uint64_t>(offset, key)};
    base = rank == 0 ? own_block : open_block(world, *memories[0], place, world_ranks);
    const ControlLayout control(base, size);
    control.block().opened.fetch_add(1);
    if (rank == 0) await_others(world, control, name, world_ranks, limit);
  } catch (...) {  // a rank that comes later may still open the block
    auto* memory = world.memory.get();
    if (own_block != nullptr) memory->retire([] { return false; }, [memory, own_block] { memory->free(own_block); });
    throw;
  }
  const ControlLayout control(base, size);
  HostGroup group{name, rank, size, world.memory, std::move(memories), control};
  group.timeline = world.options.timeline;
  return {std::make_shared<SharedMemoryTransport>(std::move(group), world_ranks, cores_suffice(world.local_size),
                                                  own_block),
          ""};
}

}  // namespace shoal::shm
