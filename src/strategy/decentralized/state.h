#pragma once
// What a decentralised wrapper keeps.

#include <ATen/record_function.h>

#include <optional>
#include <vector>

#include "engine/bucket_plan.h"
#include "engine/gradient_hooks.h"
#include "engine/parameter_watch.h"
#include "engine/step_clock.h"
#include "module/walk.h"
#include "strategy/decentralized/bucket.h"
#include "strategy/decentralized/mixing.h"

namespace shoal {

// A step is one backward that is not under no_sync, with the local ones before it.
struct DecentralizedDataParallelCore::State {
  State(std::shared_ptr<torch::nn::Module> of, OptimizerOfNamed maker, const Group& over, ModuleTensors walked,
        const DecentralizedDataParallelOptions& chosen);

  // step.cpp
  void begin_backward();
  void arrived(size_t gradient);
  void end_backward();
  void end_step();
  // Brings a step that was begun and not finished to its end without updates, so that neighbours get their versions.
  void give_up_step();
  void drop_gradients();

  // Before a forward that trains: parameters that were loaded or replaced since the last step.
  void meet_changes();

  // build.cpp
  // Collective, at the end of the first backward.
  void build_buckets();
  // In `order`.
  void make_buckets();
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
  ParameterWatch watch;  // whether others replace parameters
  std::vector<Gradient> gradients;
  Mixing mixing;
  std::optional<GradScaler> scaler;
  std::optional<OptimizerState> pending;  // loaded before there are optimizers
  std::vector<GossipBucket> buckets;
  std::vector<size_t> bucket_of;  // by gradient
  StepClock clock;
  int64_t step = 0;
  double norm = 0;
  bool left = false;

  std::optional<at::RecordFunction> forward_range;  // for profilers, while a forward runs

  enum class Phase { idle, local, running };
  Phase phase = Phase::idle;
  int no_sync_depth = 0;
  double weight = 0;      // of the step's backwards so far
  bool weighted = false;  // there were any with a weight
  enum class Progress { waiting, mixed, shown };
  std::vector<Progress> progress;  // by bucket
  std::vector<size_t> missing;     // by bucket: gradients that will come yet, as far as is known
  std::vector<int> arrivals;       // by gradient: times it came in this backward
  std::vector<int> expected;       // the most that it came so far
  std::vector<size_t> order;       // of first arrival, in the first step

  std::shared_ptr<bool> alive = std::make_shared<bool>(true);  // hooks on outputs may outlive this object
  GradientHooks hooks;                                         // last: its callbacks use all of the above

 private:
  // Whether updates wait for the last gradient.
  bool updates_at_end() const { return scaler || (options.clip_grad > 0 && options.clip == ClipScope::all_gradients); }
  void finish(size_t bucket, bool update);
  void mix(size_t bucket);
  void update(GossipBucket& bucket);
  std::vector<at::Tensor> gradients_of(const GossipBucket& bucket) const;
  std::vector<at::Tensor> all_gradients() const;
  bool unscale_and_clip();
};

}  // namespace shoal
