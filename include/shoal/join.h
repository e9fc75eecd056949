#pragma once
// Join: training with different numbers of batches per rank, after torch.distributed.algorithms.Join.

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <vector>

#include "shoal/group.h"

namespace shoal {

// State of a step in a Join scope: the ranks that still have a batch.
struct JoinState {
  bool here = true;             // this rank has a batch
  int first = 0;                // the lowest rank that has a batch
  int absent = 0;               // number of ranks without a batch
  bool by_initial_size = true;  // divisor of an unweighted mean: all ranks, or only those with a batch
};

// Interface of objects that take part in a Join: wrappers such as DistributedDataParallel, and DistributedOptimizer.
class Joinable {
 public:
  virtual ~Joinable() = default;
  virtual const Group& group() const = 0;
  // Communication of a step for which this rank has no batch: matches the collectives of forward and backward on the
  // other ranks. Does nothing under no_sync, like them. Throws StepAbandoned if one of them fails. Collective.
  virtual void shadow() = 0;

 private:
  friend class Join;
  friend class JoinAccess;  // src/engine/wrapper/join_access.h
  // Throws UsageError if the module's forward itself communicates, because shadow() cannot match that.
  virtual void check_shadow() const = 0;
  // Ends a step that failed on this rank.
  virtual void settle() = 0;
  // Sets the state of the next step; nullopt: the scope has ended.
  virtual void set_join_state(const std::optional<JoinState>& join_state) = 0;
  // Broadcasts the buffers of `rank`, and its parameters if every rank holds all of them. Collective.
  virtual void broadcast_model(int rank) = 0;
};

struct JoinOptions {
  // Divide an unweighted mean by the number of all ranks, including those that have run out of batches (their gradients
  // count as zero); off: by the number of ranks that have a batch. With backward(loss_sum, weight) the divisor is the
  // total weight in either case.
  bool divide_by_initial_world_size = true;
  // Stop all ranks with InputsExhausted as soon as one rank has no batch while another has.
  bool throw_on_early_termination = false;
};

// Loop that runs until the last rank has run out of batches.
//
//   shoal::Join join({parallel});
//   auto batches = loader->begin();
//   while (join.next(batches != loader->end())) {
//     if (join.active()) {
//       cross_entropy(parallel.forward(batches->data), batches->target).backward();
//       ++batches;
//     } else {
//       parallel.shadow();
//     }
//     optimizer.step();       // on every rank: it may own shards that others need
//     optimizer.zero_grad();
//   }
//
// An iteration may be a step or a micro-batch: under no_sync, shadow() does nothing, and the gradients that this rank
// accumulated before it ran out are reduced with the step. A rank whose batch cannot be made after next(true) calls
// abandon_step() of each wrapper, and the others get StepAbandoned. All ranks must call forward, shadow and step of
// several wrappers in the same order; each wrapper has one forward and one backward per step.
//
// Buffers, if they are broadcast, come from the lowest rank that has a batch. After the last step every rank receives
// the buffers (and the parameters, if every rank holds all of them) from the lowest rank that took part in it. The
// object can then be used for another epoch.
class Join {
 public:
  // joinables: wrappers and optimizers of one group, which must outlive the scope. Optimizers that do not reduce
  // gradients (OSS, libtorch's) need not be listed. Throws UsageError for an empty list, for groups with different
  // ranks, and for a module that cannot be shadowed (SyncBatchNorm) unless throw_on_early_termination is set. Not
  // collective.
  explicit Join(std::initializer_list<std::reference_wrapper<Joinable>> joinables, const JoinOptions& options = {});
  // Does not communicate. All ranks may leave the scope early, if all of them do.
  ~Join();
  Join(const Join&) = delete;
  Join& operator=(const Join&) = delete;

  // Returns true if some rank has a batch, so that another step follows. One all-gather of a number per rank.
  // Collective.
  bool next(bool has_batch);
  // True if this rank has a batch in this step.
  bool active() const { return now_.here; }
  // Number of ranks that have a batch in this step.
  int active_ranks() const;

 private:
  const Group& group() const { return joinables_.front()->group(); }
  std::vector<int64_t> gather(bool has_batch) const;
  void set_join_state(const std::optional<JoinState>& join_state);

  std::vector<Joinable*> joinables_;
  JoinOptions options_;
  JoinState now_;
  int64_t steps_ = 0;
};

}  // namespace shoal
