#pragma once
// Detection of dead and stopped peers, so that a wait can name the rank instead of timing out.

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/rendezvous/rendezvous.h"

namespace shoal {

struct Fault {
  int world_rank = -1;
  std::string text;  // "rank 2 (pid 41) is gone"
};

// Watches this host's peers through /proc. The first failure that any rank noticed is shared through the store, so that
// all ranks name the same culprit instead of each other; and through the host's shared memory, which outlives the rank
// that hosts the store. Thread-safe.
class Liveness {
 public:
  // memory: of this process, or nullptr.
  Liveness(const Meeting& meeting, const Placement& placement, std::shared_ptr<shm::HostMemory> memory,
           int stopped_timeout_seconds);

  // A fault of one of these ranks, if one shows now. A stopped peer counts as faulty after the timeout.
  std::optional<Fault> check(const std::vector<int>& world_ranks);
  // From now on a stopped peer is waited for.
  void wait_for_stopped() { stopped_timeout_ = std::chrono::hours(24 * 365); }
  // The first fault that any rank noticed.
  std::optional<Fault> first_failure();
  // world_rank: the culprit; -1: unknown.
  void publish(int world_rank, const std::string& text);
  // Waits until the other ranks have read why this rank ends, if it hosts the store; otherwise they would take the loss
  // of the store for the cause.
  void stay_for_others() const;

 private:
  void open_peers() const;
  // The rank that caused the end of `gone`; `gone` itself if it blamed nobody.
  int cause_of(int gone) const;

  const Meeting* meeting_;
  std::shared_ptr<shm::HostMemory> memory_;
  std::string key_;
  int own_rank_;
  std::chrono::seconds stopped_timeout_;
  std::mutex mutex_;  // guards what follows: several threads may wait
  std::vector<std::optional<std::chrono::steady_clock::time_point>> stopped_since_;
};

}  // namespace shoal
