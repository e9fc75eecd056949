#pragma once
// A module of which every rank updates its own pieces.

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/paging/first_touch.h"
#include "engine/reducer/reducer.h"
#include "engine/sharded/parameter_gather.h"
#include "engine/sharded/sharded_state.h"
#include "engine/wrapper/parameter_watch.h"
#include "module/known_module.h"
#include "shoal/telemetry.h"

namespace shoal {

// A piece of a parameter that this rank owns.
struct OwnedPiece {
  size_t gradient = 0;  // number in the reducer
  at::Tensor main;      // what the optimizer updates: the parameter's own elements as a leaf, or a float32 copy of them
  bool copied = false;  // the latter
  at::Tensor outgoing;  // where updated values leave from, one-dimensional; may be `main`'s memory
  at::Tensor sum;       // its elements of the gradients' sum
  bool whole = false;
  at::Tensor elements;  // the parameter's own, one-dimensional
  size_t bucket = 0;    // and which they are: of this bucket's
  Slice slice{};        // in_piece: its elements of the parameter, in their order in memory
  bool counted = true;  // in norms and counts; false: on another rank, which holds the same parameter

  // Copies what has been updated there.
  void put_out() const;
  // The way back, of what somebody else has written there. A float32 copy stays as exact as it is where nobody has.
  void take_back() const;
};

// The reducer's buckets, the parameters laid out like them, and this rank's pieces of both.
class ShardedModule {
 public:
  // shard: the ranks that own all of it together, the reducer's own group or one of several equal ones; gathers: by
  // bucket of the reducer; waits: measure what is waited for at first touch; originals: by gradient of the reducer, or
  // none: what this rank's elements of parameters of 16 bits were before they were rounded, in their order in memory.
  ShardedModule(Group shard, std::shared_ptr<Reducer> reducer, std::vector<std::unique_ptr<ParameterGather>> gathers,
                std::shared_ptr<Timers> waits = nullptr, std::span<const at::Tensor> originals = {});
  ~ShardedModule();
  ShardedModule(const ShardedModule&) = delete;
  ShardedModule& operator=(const ShardedModule&) = delete;

  const Group& shard() const { return shard_; }
  Reducer& reducer() { return *reducer_; }
  const Reducer& reducer() const { return *reducer_; }
  std::vector<OwnedPiece>& pieces() { return pieces_; }

  // clip_grad_norm_ where gradients carry a loss scale; set by the optimizer that has the scaler.
  std::function<double(double max_norm, double norm_type)> clip_without_scale{};

  // Whether the other ranks see this rank's pieces change as they are written, so that it must not write while they may
  // read.
  bool shared() const;
  // Before ranks meet in a step or in clipping. Where parameters are gathered as they are read: comes back when all
  // ranks have called it, and lets those read that have not. UsageError where parameters are lent, and for gradients of
  // backwards after the wrapper's end. Collective.
  void serve_readers();
  // While somebody else reads and writes the parameters, no step may change them.
  void lend(bool lent) { lent_ = lent; }
  bool lent() const { return lent_; }
  // Parameters are the module's own again: backwards are the caller's, and whatever else would use the shards throws
  // UsageError.
  void end();
  void require_going_on() const;
  // This rank's ranges are new; those that forward needs first leave first.
  void publish(const Label& label);
  // Waits for everybody's ranges; `at_first_touch`: for a bucket's when an operator first takes one of its parameters.
  void wait(const Label& label, bool at_first_touch);
  // Frozen parameters that are divided as well; names by number in the gather.
  void add_frozen(std::vector<std::string> names, std::vector<at::Tensor> parameters,
                  std::shared_ptr<ParameterGather> gather);
  // Frozen parameters that every rank has whole.
  void add_replicated(std::vector<std::string> names, std::vector<at::Tensor> parameters);
  // Of the module that these parameters belong to: others that it gets are refused as well.
  void know(KnownModule known) { known_ = std::move(known); }
  // Parameters that get another floating-point dtype are converted to the one they have here; without, that is refused.
  void convert_dtypes() { converts_ = true; }
  // What others have done to parameters since they were wrapped, by torch::load(module), set_data, or operators that
  // write them, counts from now on: the present values of all ranks, which must be equal, go to the ranks that own
  // them, and to their float32 copies. Does nothing where nothing was done. UsageError, with the parameter's name,
  // for a parameter of another dtype, device or shape, and for one that was frozen and is trainable; nothing has
  // changed then. DisagreeError where ranks have other values. Collective if there is something to do, and then on all
  // ranks.
  void adopt_changes(const Label& label);
  // The part of it that is not collective: what would be refused.
  void require_kinds() const;
  // While off, writes are not noticed.
  void notice_writes(bool on);
  // Waits now for what wait() has left to first touches.
  void wait_all() { first_touch_.touch_all(); }
  // All ranks' pieces, those of a parameter together; names begin with `prefix`.
  std::vector<StatePiece> state_pieces(const std::string& prefix) const;

 private:
  void list_pieces(std::span<const at::Tensor> originals);

  struct Known {
    std::vector<std::string> names;
    ParameterWatch watch;
    std::shared_ptr<ParameterGather> gather{};
  };
  void await(size_t bucket);
  bool changed() const;
  void refresh_copies(const std::vector<std::vector<size_t>>& changed, bool replaced);

  Group shard_;
  std::shared_ptr<Reducer> reducer_;
  std::vector<std::unique_ptr<ParameterGather>> gathers_;
  Known trainable_;   // the reducer's, as they were wrapped
  Known replicated_;  // frozen, whole on every rank
  std::vector<Known> frozen_;
  KnownModule known_;
  bool converts_ = false;
  std::vector<OwnedPiece> pieces_;
  bool lent_ = false;
  bool ended_ = false;
  Label awaited_;
  std::shared_ptr<Timers> waits_;
  FirstTouch first_touch_{[this](size_t bucket) { await(bucket); }};
};

}  // namespace shoal
