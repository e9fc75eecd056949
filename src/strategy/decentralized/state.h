#pragma once
// State of a DecentralizedDataParallel.

#include <ATen/record_function.h>

#include <optional>
#include <vector>

#include "engine/buckets/bucket_plan.h"
#include "engine/gradients/backward_tracker.h"
#include "engine/gradients/spent_gradients.h"
#include "engine/reducer/step_clock.h"
#include "engine/wrapper/parameter_watch.h"
#include "module/known_module.h"
#include "module/walk.h"
#include "strategy/decentralized/bucket.h"
#include "strategy/decentralized/common_scale.h"
#include "strategy/decentralized/mixing.h"

namespace shoal {

// What ranks must have in common, since they read each other's memory and compute the same scale.
std::vector<std::string> describe(const DecentralizedDataParallelOptions& options);

// A step is one backward that is not under no_sync, with the local ones before it.
struct DecentralizedDataParallelCore::State final : BackwardListener {
  State(std::shared_ptr<torch::nn::Module> of, OptimizerOfNamed maker, const Group& over, ModuleTensors walked,
        const DecentralizedDataParallelOptions& chosen);

  // step.cpp
  void begin_backward() override;
  void arriving(size_t /*gradient*/) override {}
  void arrived(size_t gradient) override;
  void end_local_backward() override {}
  void end_backward() override;
  // A step without a batch.
  void pass();
  void backward(const at::Tensor& loss_sum, double weight);
  void end_step();
  void forget_weights();
  // Brings a step that was begun and not finished to its end without updates, so that neighbours get their versions.
  void give_up_step();
  void drop_gradients();
  // UsageError once this rank has left.
  void require_present(const char* what) const;

  // Before a forward that trains: parameters that were loaded or replaced since the last step.
  void meet_changes();
  // UsageError where a rank has refused to go on after a version before this one, as meet_changes() does.
  void require_that_all_go_on(int64_t version) const;

  // build.cpp
  // order: in which gradients came first. Collective, at the end of the first backward.
  void build_buckets(std::vector<size_t> order);
  // Ranks tell each other the weights of their first step. Collective. DisagreeError where some give none.
  void tell_weights();
  // order: gradients as the buckets hold them.
  void make_buckets(const std::vector<size_t>& order);
  // All parameters before there are buckets, flat where that is wanted, in memory of their own.
  std::vector<GossipBucket> parts() const;
  void load_pending();
  // What neighbours get from this rank now, as after a step.
  void show_all();

  // rejoin.cpp
  // Gives this rank's state to rank 1 of the pair, and goes on. Collective over it.
  void hand_over(const Group& pair) const;
  // For a process that has taken a dead rank's place: takes a neighbour's state, and its part from now on.
  void join_again();

  std::shared_ptr<torch::nn::Module> module;
  OptimizerOfNamed make;
  Group group;
  DecentralizedDataParallelOptions options;
  ModuleTensors tensors;
  KnownModule known{module, "DecentralizedDataParallel"};
  ParameterWatch watch;  // whether others replace parameters
  std::vector<Gradient> gradients;
  SpentGradients spent;
  Mixing mixing;
  std::optional<GradScaler> scaler;
  std::optional<CommonScale> scale;  // of the scaler
  std::optional<OptimizerState> pending;  // loaded before there are optimizers
  std::vector<GossipBucket> buckets;
  std::vector<size_t> bucket_of;             // by gradient
  std::vector<std::vector<size_t>> members;  // by bucket: its gradients
  StepClock clock;
  int64_t step = 0;
  double norm = 0;
  bool left = false;

  std::optional<at::RecordFunction> forward_range;  // for profilers, while a forward runs

  int no_sync_depth = 0;
  double weight = 0;  // of the step's backwards so far
  enum class Weights { unknown, none, given };
  Weights weights = Weights::unknown;  // whether they had any
  bool weighing = false;               // backward(loss_sum, weight) is running
  std::optional<double> divisor;       // of the step's sums
  enum class Progress { waiting, mixed, shown };
  std::vector<Progress> progress;  // by bucket
  std::vector<size_t> missing;     // by bucket: gradients that will come yet, as far as is known
  std::vector<bool> used;          // by gradient: it has gone into this step's update
  std::vector<int> expected;       // by gradient: the most times that it came in one backward so far
  BackwardTracker tracker;         // last: it calls this object

 private:
  // Whether updates wait for the last gradient.
  bool updates_at_end() const { return scaler || (options.clip_grad > 0 && options.clip == ClipScope::all_gradients); }
  // What the step's sums are divided by, and what the others are told of it; once per step.
  void weigh(bool finite);
  void finish(size_t bucket, bool update);
  void mix(size_t bucket);
  void update(GossipBucket& bucket);
  std::vector<at::Tensor> gradients_of(const GossipBucket& bucket) const;
  std::vector<at::Tensor> all_gradients() const;
  bool unscale_and_clip();
};

}  // namespace shoal
