#pragma once
// What a process that comes to an elastic job must have in common with it, and what it gets of it.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "comm/membership/join_board.h"
#include "elastic/elastic_parts.h"
#include "elastic/global_batch.h"
#include "shoal/data.h"
#include "shoal/detail/optimizer_state.h"
#include "shoal/elastic.h"

namespace shoal {

// Where the job is, between two steps.
struct Position {
  int64_t done = 0;               // complete steps
  int64_t steps_before = 0;       // synchronising steps of the wrapper before those
  size_t taken = 0;               // places of the epoch that complete steps have used
  std::optional<size_t> epoch{};  // in which the loop is; nothing: between two
  size_t next_epoch = 0;          // the sampler's
};

// For DistributedDataParallel with an optimizer that is whole on each rank. A newcomer compares itself with the job before
// it asks to join, so that one that does not fit ends alone, and once more with what it gets, as options may have changed
// meanwhile.
class Admission {
 public:
  // The arguments must outlive this object. sampler: nullptr: there is none.
  Admission(ElasticParts& parts, const DistributedSampler* sampler, const ElasticOptions& options, GlobalBatch& batch,
            const std::string& transport, bool of_registry);

  // Says in the job's table what newcomers must have in common with this member, or why none can join.
  void publish(JoinBoard& board) const;
  // In a newcomer: waits for what members have said, and compares it with this process. Calls while_waiting about every 10
  // ms. UsageError that lists what differs, or says why nobody can join.
  void require_alike(JoinBoard& board, int timeout_seconds, const std::function<void()>& while_waiting) const;

  // Gives the newcomers among the ranks, in rank order, the state of rank 0, which is no newcomer, and `position`.
  // Collective. UsageError in a newcomer whose options differ; CommError on all other ranks if the state cannot be given.
  void share(const Group& group, const std::vector<bool>& newcomers, Position& position) const;

 private:
  std::string why_closed() const;
  std::vector<std::string> description() const;
  void require_alike(const std::string& job) const;
  std::string state_text(const Position& position, const OptimizerState& whole) const;
  std::vector<at::Tensor> plain_tensors() const;
  void take(const std::string& text, const Group& group, Position& position) const;

  ElasticParts& parts_;
  const DistributedSampler* sampler_;
  const ElasticOptions& options_;
  GlobalBatch& batch_;
  std::string transport_;
  bool of_registry_;
};

}  // namespace shoal
