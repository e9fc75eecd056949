#pragma once
// Join: training on inputs of which ranks have different numbers, or none. After torch.distributed.algorithms.Join.

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <vector>

#include "shoal/group.h"

namespace shoal {

// Who has a batch in a step of a Join scope.
struct Attendance {
  bool here = true;             // this rank has one
  int first = 0;                // the lowest rank that has one
  int absent = 0;               // ranks that have none
  bool by_initial_size = true;  // what a mean without weights is divided by: all ranks, or those that have one
};

// What takes part in a Join: wrappers such as DistributedDataParallel, and DistributedOptimizer.
class Joinable {
 public:
  virtual ~Joinable() = default;
  virtual const Group& group() const = 0;
  // For a step in which this rank has no batch: what forward and backward of the others communicate. Like theirs, it
  // does nothing for others under no_sync, and throws StepAbandoned when one of them fails. Collective.
  virtual void shadow() = 0;

  // For Join.
  // UsageError if forward itself communicates, so that only a forward can take part in it.
  virtual void check_shadow() const = 0;
  // Ends a step that was left broken on this rank.
  virtual void settle() = 0;
  // Who has a batch in the coming step; nothing: the scope is over.
  virtual void attend(const std::optional<Attendance>& attendance) = 0;
  // The rank's buffers, and parameters where every rank holds its own, to every rank. Collective.
  virtual void adopt_model(int rank) = 0;
};

struct JoinOptions {
  // A mean without weights is over all ranks, also those that have run out (whose gradients count as zero); off: over
  // the ranks that have a batch. With backward(loss_sum, weight) it is over the weights in either case.
  bool divide_by_initial_world_size = true;
  // All ranks stop together, with InputsExhausted, as soon as one has no batch and another has.
  bool throw_on_early_termination = false;
};

// A loop that goes on until the last rank has run out:
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
//     optimizer.step();       // on every rank: it may own what others need, and keeps its state equal
//     optimizer.zero_grad();
//   }
//
// A pass may be a step or a micro-batch: under no_sync, shadow() does nothing, and what this rank has accumulated
// before it ran out goes into the step. Gradients of a step start at zero. Ranks must call forward, shadow and step of
// several wrappers in one order; each wrapper has a forward and a backward of its own in a step.
//
// Buffers, where they are broadcast, come from the lowest rank that has a batch. After the last step every rank gets
// buffers (and parameters, where every rank holds its own) from the lowest rank that took part in it. Then the object
// is ready for another epoch.
class Join {
 public:
  // Wrappers and optimizers of one group, which must outlive the scope; optimizers without communication of gradients
  // (OSS, libtorch's) need not be listed. UsageError without any, for groups of different ranks, and for a module that
  // cannot be shadowed (SyncBatchNorm) unless throw_on_early_termination is set. Not collective.
  explicit Join(std::initializer_list<std::reference_wrapper<Joinable>> joinables, const JoinOptions& options = {});
  // Does not communicate: leaving the scope early is allowed if all ranks do.
  ~Join();
  Join(const Join&) = delete;
  Join& operator=(const Join&) = delete;

  // Whether another step follows: some rank has a batch. One all-gather of a number. Collective.
  bool next(bool has_batch);
  // This rank has a batch in this step.
  bool active() const { return now_.here; }
  // How many ranks have.
  int active_ranks() const;

 private:
  const Group& group() const { return joinables_.front()->group(); }
  std::vector<int64_t> gather(bool has_batch) const;
  void attend(const std::optional<Attendance>& attendance);

  std::vector<Joinable*> joinables_;
  JoinOptions options_;
  Attendance now_;
  int64_t steps_ = 0;
};

}  // namespace shoal
