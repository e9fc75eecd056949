#pragma once
// A module of which every rank updates its own pieces.

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/first_touch.h"
#include "engine/parameter_gather.h"
#include "engine/reducer.h"
#include "engine/sharded_state.h"
#include "shoal/engine/timers.h"

namespace shoal {

// A piece of a parameter that this rank owns.
struct OwnedPiece {
  size_t gradient = 0;  // number in the reducer
  at::Tensor main;      // what the optimizer updates: the parameter's own elements as a leaf, or a float32 copy of them
  bool copied = false;  // the latter
  at::Tensor outgoing;  // where updated values leave from, one-dimensional; may be `main`'s memory
  at::Tensor sum;       // its elements of the gradients' sum
  bool whole = false;

  // Copies what has been updated there.
  void put_out() const;
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

  // This rank's ranges are new; those that forward needs first leave first.
  void publish(const Label& label);
  // Waits for everybody's ranges; `at_first_touch`: for a bucket's when an operator first takes one of its parameters.
  void wait(const Label& label, bool at_first_touch);
  // Waits now for what wait() has left to first touches.
  void wait_all() { first_touch_.touch_all(); }
  // All ranks' pieces, those of a parameter together; names begin with `prefix`.
  std::vector<StatePiece> state_pieces(const std::string& prefix) const;

 private:
  void list_pieces(std::span<const at::Tensor> originals);

  Group shard_;
  std::shared_ptr<Reducer> reducer_;
  std::vector<std::unique_ptr<ParameterGather>> gathers_;
  std::vector<OwnedPiece> pieces_;
  Label awaited_;
  std::shared_ptr<Timers> waits_;
  FirstTouch first_touch_{[this](size_t bucket) {
    timed(waits_.get(), "params-all-gather", 1, [&] { gathers_[bucket]->wait(awaited_); });
  }};
};

}  // namespace shoal
