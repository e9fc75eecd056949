#pragma once
// Sharded module: every rank owns and updates its shards of the parameters.

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/changes/former_values.h"
#include "engine/changes/parameter_watch.h"
#include "engine/elastic/shared_state.h"
#include "engine/paging/first_touch.h"
#include "engine/reducer/reducer.h"
#include "engine/sharded/outdated_parameters.h"
#include "engine/sharded/parameter_gather.h"
#include "engine/sharded/sharded_state.h"
#include "module/known_module.h"
#include "shoal/telemetry.h"

namespace shoal {

class SecondCopies;
struct SecondOwnerCheck;

// Shard of a parameter that this rank owns.
struct OwnedPiece {
  size_t gradient = 0;  // index of the gradient in the reducer
  at::Tensor main;      // what the optimizer updates: the parameter's own elements as a leaf tensor, or a float32 copy
                        // of them
  bool copied = false;  // `main` is a float32 copy
  at::Tensor outgoing;  // source from which updated values are published, one-dimensional; may be the memory of `main`
  at::Tensor sum;       // its elements of the reduced gradient
  bool whole = false;
  at::Tensor elements;  // the parameter's own elements, one-dimensional
  size_t bucket = 0;    // bucket of these elements
  Slice slice{};        // position in that bucket; in_piece: elements of the parameter, in memory order
  int64_t taken = 0;    // version of `sum` when the optimizer took a copy of it
  int64_t sealed = 0;   // version of `sum` in the commit of an elastic job with second owners
  int owner = -1;       // rank that owns it first; -1: this one
  bool counted = true;  // included in norms and counts; false: another rank, which holds the same parameter, includes
                        // it

  // Of a float32 copy.
  FormerValues former{};

  // Copies updated values to `outgoing`.
  void put_out() const;
  // Copies values that the user has written back to `main`. Elements of a float32 copy that were not written keep their
  // full precision.
  void take_back() const;
  // Follows the parameter's own elements to where they lie now.
  void move_to(const at::Tensor& now);
};

// Whether the optimizer updates float32 copies of the parameter's elements.
inline bool has_copy(const at::Tensor& parameter) {
  return parameter.element_size() < static_cast<int64_t>(sizeof(float));
}

// `main`, a copy of this rank's elements or these themselves, with the program's changes that are not adopted yet.
at::Tensor current_values(const ParameterGather& gather, const Slice& slice, const at::Tensor& main,
                          const FormerValues& former);

// This rank's elements of a frozen parameter.
struct FrozenPiece {
  Slice slice{};          // position in the layout of the parameter's gather
  at::Tensor elements{};  // one-dimensional
  at::Tensor exact{};     // float32 copy of 16-bit elements, from before they were rounded; undefined: there is none
  FormerValues former{};

  const at::Tensor& values() const { return exact.defined() ? exact : elements; }
  // Like OwnedPiece::take_back().
  void take_back() const;
};

// The reducer's buckets, the parameters in the same layout, and this rank's shards of both.
class ShardedModule {
 public:
  // shard: the ranks that own the module together: the reducer's group, or one of several equal ones. gathers: by
  // bucket of the reducer. waits: timers for waits at first use. originals: by gradient of the reducer, or empty: this
  // rank's elements of 16-bit parameters before they were rounded, in memory order.
  ShardedModule(Group shard, std::shared_ptr<Reducer> reducer, std::vector<std::unique_ptr<ParameterGather>> gathers,
                std::shared_ptr<Timers> waits = nullptr, std::span<const at::Tensor> originals = {});
  ~ShardedModule();
  ShardedModule(const ShardedModule&) = delete;
  ShardedModule& operator=(const ShardedModule&) = delete;

  const Group& shard() const { return shard_; }
  Reducer& reducer() { return *reducer_; }
  const Reducer& reducer() const { return *reducer_; }
  std::vector<OwnedPiece>& pieces() { return pieces_; }
  // Those of which this rank is the second owner, see enable_second_owners(): not counted, and not published.
  std::vector<OwnedPiece>& second_pieces() { return second_shards_.pieces; }

  // clip_grad_norm_ for gradients with a loss scale; set by the optimizer that has the scaler, the last one if there
  // are several.
  std::function<double(double max_norm, double norm_type)> clip_without_scale{};

  // Clips gradients to which `norm` belongs: these sums, and the second copies of other ranks' sums.
  void clip_sums(std::vector<at::Tensor> sums, double norm, double max_norm);

  // True if other ranks see this rank's shards change as they are written, so that it must not write while they may
  // read.
  bool shared() const;
  // To be called at the start of a step or of clipping. If parameters are gathered on use, returns when all ranks have
  // called it, and takes part in the gathers of those that have not. Throws UsageError within summon_full_params(), and
  // for gradients of backwards after the end of the wrapper. Collective.
  void serve_readers();
  // While set, summon_full_params() holds the parameters, and no step may change them.
  void lend(bool lent) { lent_ = lent; }
  // UsageError within summon_full_params(), whose values replace those of `what` at its end.
  void require_not_lent(const char* what) const;
  bool lent() const { return lent_; }
  // Ends the sharding: parameters are the module's own again, backwards are no longer reduced, and other uses of the
  // shards throw UsageError.
  void end();
  void require_going_on() const;
  // Publishes this rank's updated shards, those that forward needs first at the beginning.
  void publish(const Label& label);
  // In place of publish() where that must not communicate. Of pages it is the same. Parameters that are whole on this
  // rank get its own shards alone, and using them is a UsageError until all ranks have called publish_now(), or
  // end_outdated() where others' shards will be replaced anyway. take_early_use(): see OutdatedParameters.
  void publish_later(const Label& label);
  void publish_now(const Label& label);
  void end_outdated() { second_shards_.outdated.end(); }
  std::string take_early_use() { return second_shards_.outdated.take_early_use(); }
  // Waits for the shards of all ranks; `at_first_touch`: for those of a bucket when an operator first uses one of its
  // parameters.
  void wait(const Label& label, bool at_first_touch);
  // Adds frozen parameters that are sharded too; names by index in the gather. pieces: this rank's.
  void add_frozen(std::vector<std::string> names, std::vector<at::Tensor> parameters,
                  std::shared_ptr<ParameterGather> gather, std::vector<FrozenPiece> pieces);
  // Adds frozen parameters that every rank holds in full.
  void add_replicated(std::vector<std::string> names, std::vector<at::Tensor> parameters);
  // Sets the module of these parameters; parameters that are added to it later are rejected.
  void know(KnownModule known) { known_ = std::move(known); }
  // Converts parameters of another floating-point dtype to the dtype that they have here, instead of rejecting them.
  void convert_dtypes() { converts_ = true; }
  // Whether a parameter that was converted has another floating-point dtype again, as after a load.
  bool any_other_dtype() const;
  // Adopts changes of parameters by the user since they were wrapped: torch::load(module), set_data, or operators that
  // write them. The current values of all ranks, which must be equal, go to the owning ranks and their float32 copies.
  // Does nothing if nothing has changed. Throws UsageError with the parameter's name for a parameter of another dtype,
  // device or shape, and for one that was frozen and is trainable now; nothing has changed then. Throws DisagreeError
  // if ranks have different values, UsageError for two parameters on the same memory. Collective if there is something
  // to do, which must then be so on all ranks.
  void adopt_changes(const Label& label);
  // Throws what adopt_changes() would, and adopts nothing: a save or a read takes current() values, and the program may
  // put others back afterwards. Collective likewise. Parameters with other strides are adopted all the same, because
  // shards are listed in the order of the parameters' memory.
  void agree_on_changes(const Label& label);
  // What the optimizer updates, with the program's changes that are not adopted yet: a copy if there are some.
  at::Tensor current(const OwnedPiece& piece) const;
  // The same where ranks share no memory, without the others, whose programs have made the same changes.
  void adopt_alone();
  // Whether there were changes since the last update, also in summon_full_params(), as note_written() tells.
  bool is_written() const { return written_ || changed(); }
  void note_written() { written_ = true; }
  // The float32 copies have been updated or loaded: what they were before does not come back.
  void drop_former() const;
  // The part of adopt_changes() that is not collective: throws what it would reject.
  void require_kinds() const;
  // While off, writes are not detected.
  void notice_writes(bool on);
  // Visits the gathers of trainable and of frozen parameters, each with the name of one of its parameters.
  void visit_gathers(const std::function<void(const std::string& parameter, ParameterGather& gather)>& visit) const;
  // Waits for what wait() has deferred to first use.
  void wait_all() { first_touch_.touch_all(); }
  // Shards of all ranks, grouped by parameter; names begin with `prefix`.
  std::vector<StatePiece> state_pieces(const std::string& prefix) const;

  // For elastic jobs, where parameters lie in memory that the ranks share. Moves the float32 copies there, once.
  // Collective.
  void share_copies();
  // What the optimizer of a rank updates, without param groups: of this rank its pieces, of others after
  // share_copies().
  std::vector<UpdateTarget> targets(int rank) const;
  // Leaves later backwards to a module that replaces this one. Returns what there was of gradients, and drops them.
  const std::vector<EarlierSums::Remains>& retire();
  // Leaves that in place of the former module, whose values are lost.
  void resume(const std::vector<EarlierSums::Remains>& remains);
  // Takes over what the optimizer updates from a module that is divided alike, so that the optimizer's tensors stay.
  void keep_pieces(const ShardedModule& former);

  // Whether parameters are pages.
  bool has_pages() const;
  // For elastic jobs whose ranks share no memory. From now on this rank is the second owner of what
  // choose_second_owners() says, and gets the sums. Values are the caller's to fill in. disable_second_owners(): no
  // longer.
  void enable_second_owners();
  void disable_second_owners();
  // Sums of second pieces are as their first owners have them. check: to which elements of the pieces are added.
  // Collective.
  void complete_second_sums(SecondOwnerCheck check);

 private:
  // What this rank is the second owner of.
  struct SecondShards {
    std::vector<OwnedPiece> pieces{};
    std::shared_ptr<SecondCopies> copies{};
    OutdatedParameters outdated{};  // those that are whole on this rank, and have not got the other ranks' last updates
  };

  void list_pieces(std::span<const at::Tensor> originals);
  // sums: of the bucket's elements from `begin` on.
  OwnedPiece piece_of(size_t bucket, const Slice& slice, const at::Tensor& sums, int64_t begin) const;
  // See separate() in separate_memory.h.
  void separate_replaced();

  struct Known {
    std::vector<std::string> names;
    ParameterWatch watch;
    std::shared_ptr<ParameterGather> gather{};
    std::vector<FrozenPiece> pieces{};
  };
  // A float32 copy whose parameter has other values.
  struct OutdatedCopy {
    const at::Tensor& elements;  // the piece's, which may lie elsewhere once the changes are adopted
    at::Tensor exact;
    FormerValues former;
    bool replaced;

    void take() const { former.take(elements, exact, replaced); }
  };
  struct Changes {  // indices within each bucket, or each gather of frozen ones
    std::vector<std::vector<size_t>> trainable{};
    std::vector<std::vector<size_t>> frozen{};
  };
  void await(size_t bucket);
  void arm_first_touch();
  void put_out() const;
  void send(const Label& label);
  void begin_outdated();
  bool changed() const;
  // Whether anything has changed once writes that were undone are forgotten.
  bool changed_for_good();
  // None: nothing has changed.
  std::optional<Changes> agreed_changes();
  // The float32 copies of parameters in another dtype, which may hold more than their own bits, take their values while
  // they are there. Returns the other outdated ones, which follow once the changes are adopted.
  std::vector<OutdatedCopy> take_other_dtypes(const Changes& changes);

  Group shard_;
  std::shared_ptr<Reducer> reducer_;
  std::vector<std::unique_ptr<ParameterGather>> gathers_;
  Known trainable_;   // the reducer's, as they were wrapped
  Known replicated_;  // frozen, whole on every rank
  std::vector<Known> frozen_;
  KnownModule known_;
  bool converts_ = false;
  std::vector<OwnedPiece> pieces_;
  SecondShards second_shards_;
  std::vector<at::Tensor> copies_;  // by bucket: float32 copies of all ranks' elements; undefined: there are none
  std::vector<EarlierSums::Remains> remains_;  // of gradients, when this module was retired
  bool lent_ = false;
  bool ended_ = false;
  bool written_ = false;
  Label awaited_;
  std::shared_ptr<Timers> waits_;
  FirstTouch first_touch_{[this](size_t bucket) { await(bucket); }};
};

}  // namespace shoal
