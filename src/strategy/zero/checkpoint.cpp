// OSS and ShardedDataParallel in checkpoints.

#include <torch/utils.h>

#include <algorithm>

#include "engine/checkpoint/reducers.h"
#include "engine/checkpoint/source.h"
#include "engine/wrapper/data_parallel_state.h"
#include "engine/wrapper/logging.h"
#include "shoal/zero.h"
#include "strategy/zero/oss_state.h"

namespace shoal {
namespace {

class OSSSource : public CheckpointSource {
 public:
  OSSSource(DataParallelCore& parallel, OSSCore& optimizer, OSSCore::State& state)
      : strategy_(dynamic_cast<ShardedDataParallelCore*>(&parallel) != nullptr ? "zero2" : "zero1"),
        parallel_(parallel),
        module_(parallel.module()),
        optimizer_(optimizer),
        state_(state) {
    const auto settings = parallel.logging_data().settings;
    frozen_may_differ_ = std::any_of(settings.begin(), settings.end(), [](const auto& setting) {
      return setting == std::pair<std::string, std::string>("sync_models_at_startup", yes_or_no(false));
    });
  }

  std::string strategy() const override { return strategy_; }
  // The wrapper's: several groups of ranks may each share the state.
  Group group() override { return reducer_of(parallel_).group(); }
  CheckpointView view() override {
    state_.require_known(optimizer_);
    require_parameters_of(*module_, optimizer_);
    CheckpointView view;
    view.shares.push_back(
        {.pieces = state_.pieces(*module_), .rank = state_.group.rank(), .local = state_.local.get()});
    view.optimizers = {&optimizer_};
    view.frozen_may_differ = frozen_may_differ_;
    add_ignored(view, *module_, tensors_of(parallel_));
    add_rest(view, *module_);
    return view;
  }
  CarriedStates carried() override { return {.own = carried_by({&reducer_of(parallel_)}), .common = {}}; }
  void begin_load(const CarriedStates& past) override {
    state_.adopt_values();
    CheckpointSource::begin_load(past);
  }
  void end_load(const CarriedStates& past) override {
    const torch::NoGradGuard no_grad;
    state_.hand_out("loaded parameters");
    resume_from(group(), {&reducer_of(parallel_)}, past.own);
  }

 private:
  std::string strategy_;
  DataParallelCore& parallel_;
  std::shared_ptr<torch::nn::Module> module_;
  OSSCore& optimizer_;
  OSSCore::State& state_;
  bool frozen_may_differ_;  // they keep each rank's values without sync_models_at_startup
};

}  // namespace

std::shared_ptr<CheckpointSource> checkpoint_source(DataParallelCore& parallel, OSSCore& optimizer) {
  return std::make_shared<OSSSource>(parallel, optimizer, optimizer.state());
}

}  // namespace shoal
