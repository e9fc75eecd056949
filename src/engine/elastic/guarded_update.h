#pragma once
// Update of a sharded optimizer that the death of a rank does not cut off.

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "comm/membership/survivors.h"
#include "engine/elastic/seen_gradient.h"
#include "engine/elastic/shared_state.h"
#include "shoal/group.h"

namespace shoal {

// Values that come from elsewhere, and are mixed into those of a tensor before it is updated.
struct GossipTerm {
  at::Tensor others{};  // sum of them by their weights, of the tensor's dtype, with elements as it has them in memory;
                        // by Group::allocate()
  double own = 1;       // weight of the tensor's own values

  // values <- own * values + others. Computed as x + (others - (1 - own) x), because rounded weights do not sum to 1,
  // and equal ranks would drift.
  static void mix(const at::Tensor& values, const at::Tensor& others, double own) {
    at::Tensor(values).add_(others.sub(values, 1 - own));
  }
};
// By what is updated.
using GossipTerms = std::unordered_map<const c10::TensorImpl*, GossipTerm>;

// Whether all hosts pass the commit: as the first rank says that asks, for all of them. JobLost if it cannot be known.
using DecideOverHosts = std::function<bool(bool passes)>;

// A step of all ranks of a host:
//
//   prepare()   each rank: its gradients lie where the others can read them
//   commit()    all ranks that live pass, or none does: CommError
//   run()       each rank updates its share; shares of ranks that have ended are finished by the lowest one that lives
//
// Before commit() has passed, no rank writes parameters or state. After it, nothing is undone. run() neither begins a
// generation nor uses the group, so it ends alike on all ranks, whoever dies in it.
//
// A share is updated chunk by chunk. Before a chunk is changed, its bytes go to a scratch in shared memory and a mark
// says so. Whoever finishes the share of a dead rank restores a chunk that is marked, and goes on with it in the dead
// rank's record, so that it may die in turn. Chunks are borders for no bit of the result: an element-wise optimizer's
// parameters are cut at multiples of 64 Ki elements, others are not cut.
//
// The optimizer's state lies in SharedState. What libtorch makes in its step moves there before the chunk is marked as
// done. A target that is a float32 copy is rounded to its parameter's own elements before that, too.
class GuardedUpdate {
 public:
  static constexpr int64_t chunk_numel = int64_t{64} << 10;
  static constexpr const char* late_change =
      "Elastic: gradients were changed in the second function of step(): clip and change them in the first one";

  // targets: what each rank updates, this rank's in the order of the optimizer. element_wise: the optimizer is.
  // Takes over the state that `local` has. local: must outlive this object. Collective. UsageError for an optimizer
  // whose state is unknown.
  GuardedUpdate(const Group& group, UpdateTargets targets, torch::optim::Optimizer& local, bool element_wise);

  // Own targets' state from before a change of the ranks, whoever owned which elements then. UsageError for state that
  // is not element by element and would have to be cut.
  void adopt(const HeldState& former);
  // The same for a single rank that is left, which needs no guard. own: what its optimizer updates.
  static void release(const HeldState& former, const std::vector<UpdateTarget>& own, torch::optim::Optimizer& local);
  // What the ranks of this object have updated, and their state.
  const HeldState& held() const { return shared_; }

  // Before commit(). mixed_in: for own targets; run() mixes it in before it updates a target. Returns whether the
  // others must map memory of this rank, all of them in one map_all(), so that they can read it after its death.
  // UsageError for state that was replaced, and sparse gradients.
  bool prepare(const GossipTerms& mixed_in = {});
  void map_all() const { survivors_.map_all(); }
  void commit();
  // In place of commit() where other hosts hold the same shares: the commit is that of all hosts, and must be called
  // once ranks have prepared and mapped. came: whether this rank knows that all ranks of all hosts have. decide: asks
  // all hosts, and gives every rank the same answer, that of the first who asks. Returns whether the commit has passed.
  bool commit_over_hosts(bool came, const DecideOverHosts& decide);
  // A commit without an update, after construction and adopt(): from then on this object counts on all ranks, and the
  // former one on none.
  void seal();
  // UsageError unless a commit has passed that was not followed by run() yet.
  void require_commit() const;
  [[noreturn]] static void refuse_without_commit();
  // UsageError if own gradients are not those of the commit any more.
  void require_committed_gradients() const;
  // updates: false, on all ranks alike: only what is mixed in changes values.
  void run(bool updates = true);
  // In place of run(), on all ranks: nothing changes in this step.
  void skip();
  // For a rank that neither runs nor skips the update, or has failed in it: whether no rank that lives has begun with
  // its own. Waits until each has come so far.
  bool is_abandoned_by_all();
  // Whether this rank's update of the last commit is complete.
  bool is_updated() const { return is_updated(group_.rank()); }

 private:
  // Of this step; undefined tensors: there is none.
  struct Gradient {
    at::Tensor read{};    // where the others can read it, too
    SeenGradient seen{};  // the caller's
  };
  struct Chunk {
    size_t target;
    int64_t begin;  // elements
    int64_t end;
    bool last;  // of its target
  };

  // Tensors of a target, of which a chunk is a part.
  struct Prepared {
    at::Tensor values{};
    at::Tensor others{};    // undefined: none are mixed in
    at::Tensor gradient{};  // undefined: no update
    std::optional<NamedState> state{};
  };

  const UpdateTarget& target(int rank, const Chunk& chunk) const {
    return shared_.targets()[static_cast<size_t>(rank)][chunk.target];
  }
  void require_own_state(size_t target) const;
  int64_t whole(const UpdateTarget& target) const;
  std::vector<Chunk> chunks(int rank) const;
  bool is_whole(int rank, const Chunk& chunk) const;
  // UsageError unless the optimizer keeps as many elements as the target has.
  static void require_elements(const UpdateTarget& target, int64_t numel);
  at::Tensor prepared(int rank, const Chunk& chunk, const at::Tensor& tensor) const;
  at::Tensor part(int rank, const Chunk& chunk, const at::Tensor& tensor) const;
  template <class Copy>
  void for_each_saved(int rank, const Chunk& chunk, const Copy& copy) const;
  void save(int rank, const Chunk& chunk) const;
  void restore(int rank, const Chunk& chunk) const;
  bool is_updated_in(const UpdateInputs& inputs) const { return updates_ && inputs.has_gradient; }
  at::Tensor read(int rank, const Chunk& chunk, const shm::Place& place) const;
  at::Tensor gradient(int rank, const Chunk& chunk) const;
  at::Tensor others(int rank, const Chunk& chunk) const;
  Prepared tensors_of(int rank, const Chunk& chunk) const;
  void step(int rank, const Chunk& chunk, const Prepared& all);
  void keep_state(int rank, const Chunk& chunk, const at::Tensor& piece);
  void update(int rank);
  void round(int rank, const Chunk& chunk, const at::Tensor& piece) const;
  void take_state(size_t target);
  // Writes the verdict on commit `number`, unless there is one.
  void give_verdict(int64_t number, bool passes) const;
  bool is_updated(int rank) const { return shared_.record(rank).updated.load() >= commits_; }
  bool is_lost(int rank) const { return !is_updated(rank) && survivors_.absent(rank); }

  Group group_;
  Survivors survivors_;
  torch::optim::Optimizer& local_;
  bool element_wise_;
  SharedState shared_;
  std::vector<Gradient> gradients_;  // by own target
  std::vector<at::Tensor> copies_;   // by own target, of gradients that the others cannot read where they are
  std::vector<at::Tensor> others_;   // by own target, what is mixed into it; undefined: nothing
  int64_t commits_ = 0;
  bool updates_ = true;  // in this run()
  uint32_t arenas_ = 0;  // that the others have mapped
};

}  // namespace shoal
