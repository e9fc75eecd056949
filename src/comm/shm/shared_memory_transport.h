#pragma once
// Operations and messages of one group over shared memory.

#include <chrono>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/shm/host_group.h"
#include "comm/shm/mailbox.h"
#include "comm/shm/operation.h"
#include "comm/transport/transport.h"

namespace shoal::shm {

// own_block: control block that this rank has allocated for the group; nullptr on the others. may_spin: see
// wait_until().
class SharedMemoryTransport final : public Transport,
                                    public Pollable,
                                    public std::enable_shared_from_this<SharedMemoryTransport> {
 public:
  SharedMemoryTransport(HostGroup group, std::vector<int> world_ranks, bool may_spin, std::byte* own_block);
  ~SharedMemoryTransport() override;
  void give_up(const std::string& why) override;
  void require_not_abandoned() override;
  void abandon(const Abandoned& why) override;
  void given_up_by_all() override;
  std::string name() const override { return "host"; }
  bool checks_agreement() const override { return true; }

  std::unique_ptr<TransportWork> issue(const Call& call) override;
  at::Tensor allocate(int64_t numel, const at::TensorOptions& options) override;
  void poll() noexcept override;
  bool in_flight() override;
  // A message is sent once it lies in this process's memory, which ends with the process: a program may end right after
  // its last message.
  void await_readers() override;

  // Rethrows the error that stopped the group.
  void check_failure();
  bool failed();
  bool wait(std::chrono::nanoseconds limit, const std::function<bool()>& finished);
  std::vector<int> missing(const Operation& operation);

 private:
  // Waits until no rank uses the tensors of others any more, for 2 s at most: one may be stopped. One that has ended is
  // not waited for.
  void await_users();
  void retire_unread(const std::function<void()>& unread);
  void check(const Call& call) const;
  void advance();
  void tell_others(ControlBlock::Fault fault, const std::string& text, int culprit);

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

}  // namespace shoal::shm
