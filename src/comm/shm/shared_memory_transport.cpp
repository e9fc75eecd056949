#include "comm/shm/shared_memory_transport.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstring>
#include <thread>

#include "comm/reduce/reduce_kernels.h"
#include "comm/shm/wait.h"
#include "shoal/detail/clock.h"
#include "shoal/error.h"

namespace shoal::shm {
namespace {

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

}  // namespace

SharedMemoryTransport::SharedMemoryTransport(HostGroup group, std::vector<int> world_ranks, bool may_spin,
                                             std::byte* own_block)
    : group_(std::move(group)),
      world_ranks_(std::move(world_ranks)),
      may_spin_(may_spin),
      own_block_(own_block),
      mailboxes_(group_, world_ranks_) {
  group_.memory->attach(*this);
}

SharedMemoryTransport::~SharedMemoryTransport() {
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

void SharedMemoryTransport::give_up(const std::string& why) {
  {
    const std::lock_guard lock(mutex_);
    given_up_ = true;
    failure_ = std::make_exception_ptr(CommError(why));
  }
  group_.memory->wake();
}

void SharedMemoryTransport::require_not_abandoned() {
  const auto& block = group_.control.block();
  const auto fault = block.fault.load(std::memory_order_acquire);
  if (fault == ControlBlock::disagreed) throw DisagreeError(block.fault_text);
  if (fault == ControlBlock::abandoned) throw Abandoned(block.fault_text, block.culprit);
}

void SharedMemoryTransport::abandon(const Abandoned& why) {
  {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = std::make_exception_ptr(why);
    tell_others(ControlBlock::abandoned, why.what(), why.culprit());
  }
  group_.memory->wake();
  await_users();
}

void SharedMemoryTransport::given_up_by_all() {
  const std::lock_guard lock(mutex_);
  given_up_by_all_ = true;
  operations_.clear();
  announced_ = 0;
}

std::unique_ptr<TransportWork> SharedMemoryTransport::issue(const Call& call) {
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

at::Tensor SharedMemoryTransport::allocate(int64_t numel, const at::TensorOptions& options) {
  if (!options.device().is_cpu()) return Transport::allocate(numel, options);
  auto memory = group_.memory;
  auto* data = memory->allocate(static_cast<size_t>(numel) * options.dtype().itemsize());
  return at::from_blob(
      data, {numel}, [memory, data](void*) { memory->free(data); }, options);
}

void SharedMemoryTransport::poll() noexcept {
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

bool SharedMemoryTransport::in_flight() {
  const std::lock_guard lock(mutex_);
  return failure_ == nullptr && (!operations_.empty() || mailboxes_.in_flight());
}

void SharedMemoryTransport::await_readers() {
  const auto deadline = Clock::now() + std::chrono::seconds(10);
  const auto settled = [this] {
    const std::lock_guard lock(mutex_);
    return failure_ != nullptr || mailboxes_.all_read();
  };
  while (!settled() && Clock::now() < deadline) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void SharedMemoryTransport::check_failure() {
  std::unique_lock lock(mutex_);
  if (!failure_) return;
  const auto failure = failure_;
  lock.unlock();
  await_users();
  std::rethrow_exception(failure);
}

bool SharedMemoryTransport::failed() {
  const std::lock_guard lock(mutex_);
  return failure_ != nullptr;
}

bool SharedMemoryTransport::wait(std::chrono::nanoseconds limit, const std::function<bool()>& finished) {
  return wait_until(*group_.memory, may_spin_, limit,
                    [&] { return finished() || failed() || group_.memory->interrupted(); });
}

std::vector<int> SharedMemoryTransport::missing(const Operation& operation) {
  const std::lock_guard lock(mutex_);
  std::vector<int> ranks;
  for (const int rank : operation.missing()) ranks.push_back(world_ranks_[rank]);
  return ranks;
}

void SharedMemoryTransport::await_users() {
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

void SharedMemoryTransport::retire_unread(const std::function<void()>& unread) {
  if (given_up_by_all_) {
    unread();
  } else {
    group_.memory->retire([] { return false; }, unread);
  }
}

void SharedMemoryTransport::check(const Call& call) const {
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

void SharedMemoryTransport::advance() {
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

void SharedMemoryTransport::tell_others(ControlBlock::Fault fault, const std::string& text, int culprit) {
  auto& block = group_.control.block();
  uint32_t none = ControlBlock::none;
  if (!block.fault.compare_exchange_strong(none, ControlBlock::being_written)) return;
  std::strncpy(block.fault_text, text.c_str(), sizeof block.fault_text - 1);
  block.culprit = culprit;
  block.fault.store(fault);
  group_.ring_others();
}

}  // namespace shoal::shm
