// OSS and ShardedDataParallel in checkpoints.

#include <torch/utils.h>

#include <functional>
#include <set>

#include "checkpoint/on_all_ranks.h"
#include "engine/checkpoint/reducers.h"
#include "engine/checkpoint/source.h"
#include "engine/wrapper/data_parallel_state.h"
#include "module/walk.h"
#include "shoal/zero.h"
#include "strategy/zero/oss_state.h"

namespace shoal {
namespace {

class OSSSource : public CheckpointSource {
 public:
  enum class Adopt { trainable, all };
  // adopt: what the optimizer takes over in its next step. Collective.
  OSSSource(DataParallelCore& parallel, OSSCore& optimizer, OSSCore::State& state, std::function<void(Adopt)> adopt)
      : strategy_(dynamic_cast<ShardedDataParallelCore*>(&parallel) != nullptr ? "zero2" : "zero1"),
        parallel_(parallel),
        module_(parallel.module()),
        optimizer_(optimizer),
        state_(state),
        adopt_(std::move(adopt)) {}

  std::string strategy() const override { return strategy_; }
  // The wrapper's: several groups of ranks may each share the state.
  Group group() override { return reducer_of(parallel_).group(); }
  // Parameters that were unfrozen or converted get their place now, not in the next forward.
  void adopt_changes() override {
    on_all_ranks(group(), "checkpoint", [&] { state_.require_known(optimizer_); });
    adopt_(Adopt::all);
  }
  void begin_save() override {
    on_all_ranks(group(), "checkpoint", [&] { state_.require_known(optimizer_); });
    adopt_(Adopt::trainable);
  }
  void own_frozen(const std::set<std::string>& names) override {
    if (names.empty() || state_.has_commit()) return;  // shares of an elastic job's ranks stay: the load is refused
    const auto before = state_.owned_though_frozen;
    for (const auto& entry : walk(*module_, {}).parameters) {
      if (names.contains(entry.name)) state_.owned_though_frozen.insert(entry.tensor.unsafeGetTensorImpl());
    }
    try {
      adopt_(Adopt::all);
    } catch (...) {
      state_.owned_though_frozen = before;
      throw;
    }
  }
  CheckpointView view() override {
    state_.require_known(optimizer_);
    require_parameters_of(*module_, optimizer_);
    CheckpointView view;
    view.shares.push_back(
        {.pieces = state_.pieces(*module_), .rank = state_.group.rank(), .local = state_.local.get()});
    view.optimizers = {&optimizer_};
    view.frozen_may_differ = !was_synchronized(parallel_);  // ZeRO brings only what it trains to all ranks
    add_ignored(view, *module_, tensors_of(parallel_));
    add_rest(view, *module_);
    return view;
  }
  CarriedStates carried() override { return {.own = carried_by({&reducer_of(parallel_)}), .common = {}}; }
  void end_load(const CarriedStates& past) override {
    const torch::NoGradGuard no_grad;
    state_.hand_out(state_.label("loaded parameters"));
    differences_ = resume_from(group(), {&reducer_of(parallel_)}, past.own);
  }

 private:
  std::string strategy_;
  DataParallelCore& parallel_;
  std::shared_ptr<torch::nn::Module> module_;
  OSSCore& optimizer_;
  OSSCore::State& state_;
  std::function<void(Adopt)> adopt_;
};

}  // namespace

std::shared_ptr<CheckpointSource> checkpoint_source(DataParallelCore& parallel, OSSCore& optimizer) {
  const auto adopt = [&optimizer](OSSSource::Adopt what) {
    auto& groups = optimizer.param_groups_;
    if (what == OSSSource::Adopt::all) {
      optimizer.adopt_changes();
    } else if (optimizer.state().must_share_again(groups)) {
      optimizer.share(groups, groups.size());
    }
  };
  return std::make_shared<OSSSource>(parallel, optimizer, optimizer.state(), adopt);
}

}  // namespace shoal
