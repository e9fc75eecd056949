#pragma once
// State of a DecentralizedDataParallel.

#include <ATen/record_function.h>

#include <optional>
#include <vector>

#include "engine/buckets/bucket_plan.h"
#include "engine/changes/loads.h"
#include "engine/changes/parameter_watch.h"
#include "engine/gradients/backward_tracker.h"
#include "engine/gradients/backward_weight.h"
#include "engine/gradients/spent_gradients.h"
#include "engine/reducer/step_clock.h"
#include "module/known_module.h"
#include "module/walk.h"
#include "strategy/decentralized/bucket.h"
#include "strategy/decentralized/common_scale.h"
#include "strategy/decentralized/micro_batches.h"
#include "strategy/decentralized/mixing.h"
#include "strategy/decentralized/whole_optimizer.h"

namespace shoal {

// Options that must be equal on all ranks, because ranks read each other's memory and compute the same loss scale.
std::vector<std::string> describe(const DecentralizedDataParallelOptions& options);

// State of the wrapper. A step is one backward outside no_sync, together with the local backwards before it.
struct DecentralizedDataParallelCore::State final : BackwardListener {
  State(std::shared_ptr<torch::nn::Module> of, OptimizerRecipe of_optimizers, const Group& over, ModuleTensors walked,
        const DecentralizedDataParallelOptions& chosen);

  // step.cpp
  void begin_backward() override;
  void arriving(size_t /*gradient*/) override {}
  void arrived(size_t gradient) override;
  void end_local_backward() override { micro_batches.note_values(weights == Weights::given); }
  void end_backward(EndStage stage) override;
  bool synchronises() const override { return no_sync_depth == 0; }
  // Makes a step without a batch; drops gradients of micro-batches before.
  void step_without_update();
  void backward(const at::Tensor& loss_sum, double weight);
  void end_step();
  void forget_weights();
  // Call between backwards: weights of micro-batches go with the gradients, if the program has dropped these.
  void forget_dropped_weights();
  // Completes a step that was begun and not finished, without updates, so that neighbours get its versions.
  void give_up_step();
  void drop_gradients();
  // UsageError once this rank has left.
  void require_present(const char* what) const;

  // Call before a forward that trains: handles parameters that were loaded or replaced since the last step.
  void adopt_changes();
  // UsageError if a rank has stopped before this version, as adopt_changes() does.
  void require_that_all_go_on(int64_t version) const;

  // build.cpp
  // order: of the first arrival of gradients. Collective, at the end of the first backward, or in a load before it.
  void build_buckets(std::vector<size_t> order);
  // Exchanges the weights of the ranks' first step. Collective. DisagreeError if some ranks give none.
  void tell_weights();
  // order: of gradients in the buckets.
  void make_buckets(const std::vector<size_t>& order);
  // Buckets of all parameters, in their own memory, for use before build_buckets().
  std::vector<GossipBucket> parts() const;
  // The same with optimizers and schedules as at the first step.
  std::vector<GossipBucket> buckets_with_optimizers() const;
  void load_pending();
  // Parameters that were given each other's memory (set_data) get memory of their own, with their present values. Call
  // before buckets adopt. UsageError for two on the same memory.
  void separate();
  // Shows this rank's present values to its neighbours, as after a step.
  void publish_all();

  // rejoin.cpp
  // Gives this rank's state to rank 1 of the pair; this rank then goes on. Collective over the pair.
  void send_state_to(const Group& pair) const;
  // For a process that replaces a dead rank: takes a neighbour's state.
  void rejoin();

  std::shared_ptr<torch::nn::Module> module;
  OptimizerRecipe recipe;
  Group group;
  DecentralizedDataParallelOptions options;
  ModuleTensors tensors;
  KnownModule known{module, "DecentralizedDataParallel"};
  ParameterWatch watch;  // detects parameters that others replace
  Loads loads{};
  std::vector<Gradient> gradients;
  SpentGradients spent;
  MicroBatches micro_batches{gradients};
  Mixing mixing;
  std::optional<GradScaler> scaler;
  std::optional<CommonScale> scale;       // computes the state of `scaler`
  std::optional<OptimizerState> pending;  // loaded before the optimizers exist
  StateDtypes pending_dtypes = StateDtypes::of_parameters;
  std::vector<at::Tensor> homes;        // by gradient, if their memory moves to buckets in the first step
  std::optional<WholeOptimizer> whole;  // see take_options_from()
  std::vector<GossipBucket> buckets;
  std::vector<size_t> bucket_of;             // by gradient
  std::vector<std::vector<size_t>> members;  // by bucket: indices of its gradients
  StepClock clock;
  int64_t step = 0;
  double norm = 0;
  bool left = false;

  std::optional<at::RecordFunction> forward_range;  // for profilers; set while a forward runs

  int no_sync_depth = 0;
  double weight = 0;  // sum over the step's backwards so far
  enum class Weights { unknown, none, given };
  Weights weights = Weights::unknown;  // whether backwards had weights
  bool weighing = false;               // backward(loss_sum, weight) is running
  OuterBackwardWeight others_weight;   // of a backward(loss_sum, weight) of another wrapper
  bool weights_told = false;           // ranks know the weights of each other's first step, or of one before a load
  std::optional<double> divisor;       // divisor of the step's sums
  enum class Progress { waiting, mixed, shown };
  std::vector<Progress> progress;  // by bucket
  std::vector<size_t> missing;     // by bucket: number of gradients that are expected to arrive
  std::vector<bool> used;          // by gradient: part of this step's update
  std::vector<int> expected;       // by gradient: maximum number of arrivals in one backward so far
  BackwardTracker tracker;         // last member: it calls this object

 private:
  // Whether updates wait for the last gradient.
  bool updates_at_end() const {
    return scaler || !weights_told || (options.clip_grad > 0 && options.clip == ClipScope::all_gradients);
  }
  void equip(GossipBucket& bucket) const;
  void load_into(GossipBucket& bucket, const OptimizerState& whole) const;
  // Computes the divisor of the step's sums and the news for other ranks; once per step.
  void weigh(bool finite);
  void finish(size_t bucket, bool update);
  void mix(size_t bucket);
  void update(GossipBucket& bucket);
  std::vector<at::Tensor> gradients_of(const GossipBucket& bucket) const;
  std::vector<at::Tensor> all_gradients() const;
  bool unscale_and_clip();
};

}  // namespace shoal
