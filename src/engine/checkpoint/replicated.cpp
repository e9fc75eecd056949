// Checkpoint sources of replicated trainings: one process, and DistributedDataParallel.

#include "engine/checkpoint/reducers.h"
#include "engine/checkpoint/source.h"
#include "engine/wrapper/data_parallel_state.h"
#include "shoal/error.h"
#include "shoal/hooks.h"

namespace shoal {
namespace {

class ReplicatedSource : public CheckpointSource {
 public:
  ReplicatedSource(std::string strategy, std::shared_ptr<torch::nn::Module> module, torch::optim::Optimizer& optimizer,
                   Group group)
      : strategy_(std::move(strategy)), module_(std::move(module)), optimizer_(optimizer), group_(std::move(group)) {
    if (!module_) throw UsageError("TrainingState: the module is empty");
    refuse_sharded(
        optimizer_,
        "TrainingState: these parts are those of an optimizer that is the same on every rank, and this one is sharded: "
        "give an OSS by its own type with its wrapper, TrainingState(parallel, optimizer), a DistributedOptimizer "
        "alone, TrainingState(optimizer), and others with their FullyShardedDataParallel");
  }

  std::string strategy() const override { return strategy_; }
  Group group() override { return group_; }
  CheckpointView view() override {
    require_parameters_of(*module_, optimizer_);
    CheckpointView view;
    view.shares.push_back({.pieces = pieces_of(optimizer_, *module_), .local = &optimizer_, .everywhere = true});
    view.optimizers = {&optimizer_};
    view.frozen_may_differ = true;  // nothing has brought them to all ranks
    add_rest(view, *module_);
    return view;
  }
  // No barrier: ranks write only memory that no other rank reads.
  void begin_load(const CarriedStates&) override {}

 private:
  std::string strategy_;
  std::shared_ptr<torch::nn::Module> module_;
  torch::optim::Optimizer& optimizer_;
  Group group_;
};

// Source with a wrapper, whose reducer carries state from step to step.
class WrappedSource : public ReplicatedSource {
 public:
  WrappedSource(DataParallelCore& parallel, torch::optim::Optimizer& optimizer)
      : ReplicatedSource("ddp", parallel.module(), optimizer, parallel.group()), parallel_(parallel) {}

  // The wrapper's present one, which changes in an elastic job.
  Group group() override { return parallel_.group(); }
  // After post-local SGD has begun, groups of ranks train parameters of their own between two averages.
  std::optional<Group> peers() override {
    const bool local = dynamic_cast<const PostLocalSgdHook*>(reducer_of(parallel_).reduction().hook()) != nullptr;
    return local ? std::optional(group()) : std::nullopt;
  }
  CheckpointView view() override {
    auto view = ReplicatedSource::view();
    view.frozen_may_differ = !was_synchronized(parallel_);
    add_ignored(view, *parallel_.module(), tensors_of(parallel_));
    return view;
  }
  CarriedStates carried() override { return {.own = carried_by({&reducer_of(parallel_)}), .common = {}}; }
  void end_load(const CarriedStates& past) override {
    differences_ = resume_from(group(), {&reducer_of(parallel_)}, past.own);
  }

 private:
  DataParallelCore& parallel_;
};

}  // namespace

std::shared_ptr<CheckpointSource> checkpoint_source(std::shared_ptr<torch::nn::Module> module,
                                                    torch::optim::Optimizer& optimizer, const Group& group) {
  return std::make_shared<ReplicatedSource>("none", std::move(module), optimizer, group);
}

std::shared_ptr<CheckpointSource> checkpoint_source(DataParallelCore& parallel, torch::optim::Optimizer& optimizer) {
  return std::make_shared<WrappedSource>(parallel, optimizer);
}

}  // namespace shoal
