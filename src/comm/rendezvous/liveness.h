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

// Watches the peers of this host through /proc. The first failure that anyone in the job noticed is shared through the
// store, so that all ranks name the same culprit and not each other; and through the host's memory, which outlives the
// rank that hosts the store. Thread-safe.
class Liveness {
 public:
  // `memory`: of this process, or none.
  Liveness(const Meeting& meeting, const Placement& placement, std::shared_ptr<HostMemory> memory,
           int stopped_timeout_seconds);

  // The fault of one of these ranks, if any shows now. A stopped peer counts after the timeout.
  std::optional<Fault> check(const std::vector<int>& world_ranks);
  // What anyone in the job has noticed first.
  std::optional<Fault> first_failure();
  // `world_rank`: the culprit; -1: not known.
  void publish(int world_rank, const std::string& text);
  // Who hosts the store and knows why it ends stays until the others have looked, so that they do not take its own end
  // for the cause.
  void stay_for_others() const;

 private:
  // The rank because of which a rank that is gone has ended, itself if it has blamed nobody.
  int cause_of(int gone) const;

  const Meeting* meeting_;
  std::shared_ptr<HostMemory> memory_;
  std::string key_;
  int own_rank_;
  std::chrono::seconds stopped_timeout_;
  std::mutex mutex_;  // below: several threads may wait
  std::vector<std::optional<std::chrono::steady_clock::time_point>> stopped_since_;
};

}  // namespace shoal
