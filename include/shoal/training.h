#pragma once
// Training of a module under a strategy of the registry (shoal/strategy.h), given its name and an optimizer's recipe.

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "shoal/checkpoint.h"
#include "shoal/detail/data_parallel.h"
#include "shoal/detail/elastic_training.h"
#include "shoal/detail/inputs.h"
#include "shoal/detail/sharded_optimizer.h"
#include "shoal/error.h"
#include "shoal/group.h"
#include "shoal/join.h"
#include "shoal/optimizer_state.h"
#include "shoal/strategy.h"
#include "shoal/telemetry.h"

namespace shoal {

// Result of Training::replan() and replan().
struct Replanned {
  std::string from;  // the strategies
  std::string to;
  int ranks_before = 0;
  int ranks = 0;
  double seconds = 0;  // duration on this rank
  int64_t bytes = 0;   // that this rank has received of other ranks' parameters and state
  // What did not go over, one sentence each, as in Loaded.
  std::vector<std::string> differences{};
};

// Training of a module of any type under a strategy. Methods do what the methods of the strategy's wrapper and
// optimizer do; a method that the strategy does not have throws UsageError.
class TrainingCore : public ElasticTraining {
 public:
  explicit TrainingCore(const TrainingParts& parts);
  ~TrainingCore() override = default;
  TrainingCore(const TrainingCore&) = delete;
  TrainingCore& operator=(const TrainingCore&) = delete;

  // Backward of a micro-batch's loss, which it scales if there is a scaler. Call it under no_sync() except for the last
  // micro-batch of a step.
  void backward(const at::Tensor& loss) { scale_loss(loss).backward(); }
  // Backward of a loss that is a sum over `weight` samples; see DataParallelCore::backward.
  virtual void backward(const at::Tensor& loss_sum, double weight);
  virtual at::Tensor scale_loss(const at::Tensor& loss) const;
  [[nodiscard]] virtual NoSync no_sync(bool accumulate = true);
  // Unscales, clips and updates, unless backward has done so. Returns whether parameters were updated.
  virtual bool step() = 0;
  virtual void zero_grad() { optimizer().zero_grad(); }
  // Call after an exception in a step; see DataParallelCore::abandon_step.
  virtual void abandon_step() {}
  // For Join.
  virtual Joinable& joinable();

  // The optimizer whose rates and other options schedules change and steps use. For strategies that step their
  // optimizers themselves, an optimizer without state; TrainingOptions::schedule alone sets the rates there, which it
  // shows after each step.
  torch::optim::Optimizer& optimizer() override = 0;
  // The optimizers that hold this rank's state.
  virtual std::vector<const torch::optim::Optimizer*> local_optimizers() const = 0;
  // State of the whole optimizer, by name. Collective if the state is sharded.
  virtual OptimizerState optimizer_state() = 0;
  // Checkpoint interface; none for strategies whose ranks train independently.
  virtual std::optional<TrainingState> state() = 0;
  // Saves the module, as full_parameters() shows it, to a .pt or .safetensors file for other programs; see
  // shoal::save_module (shoal/checkpoint.h). The first rank that is still there writes. To load the file, use
  // load(file, *state(), {.model_only = true}). Errors on every rank. Collective, except where ranks know nothing of
  // each other: there rank 0 alone writes its own model.
  void save_module(const std::filesystem::path& file);

  // This rank's parameters and, after a backward, gradients, as far as it holds them.
  virtual std::vector<at::Tensor> parameters() const { return module_->parameters(); }
  virtual std::vector<at::Tensor> gradients() const;
  // Scope in which every rank can read all parameters, to evaluate or save them. Collective at both ends.
  virtual std::shared_ptr<void> full_parameters() { return nullptr; }
  // Whether this rank can read all parameters without the other ranks.
  virtual bool has_whole_model() const { return true; }

  // Ranks that make every step together; none: all.
  virtual std::optional<Group> lockstep_group() const { return std::nullopt; }
  // Ranks that have not ended; none: all. Collective over them.
  virtual std::optional<Group> active_group() { return std::nullopt; }
  // The first rank that has not ended, as far as this rank knows.
  virtual int first_active_rank() const { return 0; }
  // Statistics of exchanges between neighbours, and the models' distance from their mean; none for strategies without
  // such exchanges. consensus_distance: collective.
  virtual const ExchangeStatistics* exchanges() const { return nullptr; }
  virtual double consensus_distance() { return 0; }
  // Report of the wrapper; none if there is no wrapper.
  virtual std::optional<LoggingData> logging_data() const { return std::nullopt; }
  // Names of the parameters in each bucket; empty if gradients are not reduced in buckets.
  virtual std::vector<std::vector<std::string>> buckets() const { return {}; }

  // Statistics of this rank's groups together: all that the strategy communicates in, and in an elastic job also those
  // before a change of the ranks. Exchanges between neighbours are not calls of a group; see exchanges().
  GroupStatistics statistics() const;

  const Strategy& strategy() const { return strategy_; }
  const Group& group() const { return group_; }
  // What the training was made of.
  const TrainingParts& parts() const { return *parts_; }
  virtual const Precision& precision() const { return precision_; }
  at::DeviceType device() const { return device_; }

 protected:
  // Called before and after the module's forward, as in DataParallelCore.
  template <class Module>
  friend class Training;
  virtual void before_forward() {}
  virtual void after_forward(const std::vector<at::Tensor>& /*outputs*/) {}
  virtual void forward_failed() {}
  virtual TensorCast input_cast() const { return {}; }

  // For replan(). abandon_failed_step: abandons a step that has failed on this rank, if there is one; collective with
  // the other ranks' step. open_scope: a scope that refers to this training and has not ended, "no_sync()"; empty:
  // none. updates_in_backward: backward has used the gradients that grad() shows.
  friend class ReplanAccess;
  virtual void abandon_failed_step() {}
  virtual std::string open_scope() const { return {}; }
  virtual bool updates_in_backward() const { return false; }

  [[noreturn]] void throw_unsupported(const std::string& what) const;
  // Groups in which the strategy communicates; a group may be there several times.
  virtual std::vector<Group> groups() const { return {group_}; }

  const Strategy& strategy_;
  std::shared_ptr<torch::nn::Module> module_;
  Group group_;
  double clip_grad_;
  Precision precision_;

 private:
  // For Elastic.
  void require_elastic() override;
  void leave_groups() override;
  void follow(const Group& group) override;
  std::vector<std::string> description() const override;

  at::DeviceType device_;
  std::shared_ptr<const TrainingParts> parts_;
  GroupStatistics former_{};      // of groups before the last change of the ranks
  std::vector<Group> leaving_{};  // while the ranks change
};

// Implementation of make_training() for a module of any type, also for bindings. Collective.
std::unique_ptr<TrainingCore> make_training_core(const std::string& strategy, std::shared_ptr<torch::nn::Module> module,
                                                 OptimizerRecipe recipe, const Group& group,
                                                 const TrainingOptions& options = {});

// Implementation of replan() for a module of any type. core: nullptr on ranks that do not train; replaced in place.
// options: none: options_for().
Replanned replan_core(std::unique_ptr<TrainingCore>& core, const std::string& strategy,
                      const std::shared_ptr<torch::nn::Module>& module, const OptimizerRecipe& recipe,
                      const std::optional<Group>& group, const Group& job,
                      const std::optional<TrainingOptions>& options);
// The options for a strategy when none are given. Those of the same strategy stay; for another one, `options` and
// communication_hook are left out, and precision is what precision_of() has for it under the same name (bf16_mixed:
// 16-bit parameters with float32 main copies, or autocast), the same one if it has none. UsageError for a schedule that
// it does not take.
TrainingOptions options_for(const TrainingCore& core, const std::string& strategy);

namespace detail {

[[noreturn]] void refuse_lost_training();

}  // namespace detail

// Training of a module, with its optimizer.
//
//   auto training = shoal::make_training(name, model, shoal::optimizer_recipe<shoal::FusedAdamW>(
//                                                         torch::optim::AdamWOptions(1e-3)), world.group());
//   for (...) {
//     training->backward(cross_entropy(training.forward(x), y));
//     training->step();
//     training->zero_grad();
//   }
//
// Move-only. Not thread-safe.
template <class Module>
class Training {
 public:
  Training(std::shared_ptr<Module> module, std::unique_ptr<TrainingCore> core)
      : module_(std::move(module)), core_(std::move(core)) {}

  // Continues under another strategy, other options or another precision, between two steps, without a disk:
  //
  //   training.replan("fsdp");
  //   schedule = schedule->on(training->optimizer());
  //
  // Call it after step() and zero_grad(), on all ranks. The module and its parameters remain the same objects; they are
  // converted to the new precision's dtype. Ranks exchange what they hold in memory: parameters, float32 main copies,
  // and the optimizer's whole state with the options of its param groups, learning rates included, as a load from a
  // checkpoint would have them. The loss scaler's state and, if strategy and number of ranks stay, the strategy's own
  // (order of buckets, communication hook) are included. Between strategies whose ranks have values of their own and
  // others, the mean goes over.
  //
  // optimizer() is a new object, and so is everything else that the training handed out: a schedule, a TrainingState or
  // a Join for the former one must not be used any more. LambdaLR::on() makes a schedule for the new optimizer.
  //
  // options: without them, see options_for(). recipe: without it, the same optimizer; another one must have the same
  // kind of state. Memory: old state and new, a copy of this rank's share of the parameters, and a portion of 64 MiB.
  //
  // Throws on every rank: UsageError if there are gradients (in the middle of an accumulation, or before zero_grad()),
  // within no_sync(), a Join or full_parameters(), for a strategy without a checkpoint state (`local`), and as
  // make_training() and load(); DisagreeError for different arguments. The training then continues as before, but
  // optimizer() may be a new object. CommError if a rank has died; the training is lost then. Collective.
  Replanned replan(const std::string& strategy) { return replan_here(strategy, std::nullopt, core().parts().recipe); }
  Replanned replan(const std::string& strategy, const TrainingOptions& options) {
    return replan_here(strategy, options, core().parts().recipe);
  }
  Replanned replan(const std::string& strategy, const TrainingOptions& options, const OptimizerRecipe& recipe) {
    return replan_here(strategy, options, recipe);
  }

  // Return value of the module's own forward, if any.
  template <class... Arguments>
  auto forward(Arguments&&... arguments) {
    return detail::with_cast_inputs<Module>(
        std::index_sequence_for<Arguments...>(), core().input_cast(),
        [this](auto&&... inputs) { return this->forward_of_module(std::forward<decltype(inputs)>(inputs)...); },
        std::forward<Arguments>(arguments)...);
  }

  // The same as forward().
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    return forward(std::forward<Arguments>(arguments)...);
  }

  const std::shared_ptr<Module>& module() const { return module_; }
  TrainingCore* operator->() const { return &core(); }
  TrainingCore& operator*() const { return core(); }
  // Gives up the typed part.
  std::unique_ptr<TrainingCore> release() && { return std::move(core_); }

 private:
  TrainingCore& core() const {
    if (!core_) detail::refuse_lost_training();
    return *core_;
  }
  Replanned replan_here(const std::string& strategy, const std::optional<TrainingOptions>& options,
                        const OptimizerRecipe& recipe) {
    const auto ranks = core().active_group().value_or(core().group());
    return replan_core(core_, strategy, module_, recipe, ranks, ranks, options);
  }
  template <class... Inputs>
  auto forward_of_module(Inputs&&... inputs) {
    return detail::forward_between([this] { core_->before_forward(); },
                                   [&] {
                                     const Precision::Scope scope(core_->precision(), core_->device());
                                     return module_->forward(std::forward<Inputs>(inputs)...);
                                   },
                                   [this](const std::vector<at::Tensor>& tensors) { core_->after_forward(tensors); },
                                   [this] { core_->forward_failed(); });
  }

  std::shared_ptr<Module> module_;
  std::unique_ptr<TrainingCore> core_;
};

// Collective, except for strategies whose ranks train independently. Throws the strategy's own errors, and those of
// find_strategy() and option_values(). UsageError for a recipe without `defaults` or `make`, for a schedule or a
// communication hook that the strategy would not use, and for an ignored name that the module does not have.
template <class Module>
Training<Module> make_training(const std::string& strategy, std::shared_ptr<Module> module, OptimizerRecipe recipe,
                               const Group& group, const TrainingOptions& options = {}) {
  auto core = make_training_core(strategy, module, std::move(recipe), group, options);
  return Training<Module>(std::move(module), std::move(core));
}
template <class Module>
Training<Module> make_training(const std::string& strategy, const torch::nn::ModuleHolder<Module>& module,
                               OptimizerRecipe recipe, const Group& group, const TrainingOptions& options = {}) {
  return make_training(strategy, module.ptr(), std::move(recipe), group, options);
}
template <detail::BareModule Bare, class... Rest>
auto make_training(const std::string& strategy, Bare&& module, Rest&&... rest) {
  return make_training(strategy, detail::refuse_bare_module<Bare>(module), std::forward<Rest>(rest)...);
}

// Continues a training on other ranks, and under any strategy; see Training::replan().
//
//   const auto four = world.group();
//   std::optional<shoal::Training<Net>> training = shoal::make_training("fsdp", model, recipe, four);
//   ...
//   std::optional<shoal::Group> three;  // rank 3 leaves
//   if (four.rank() < 3) three = four.subgroup({0, 1, 2});
//   shoal::replan(training, "fsdp", model, recipe, three, four);
//
// training: nothing on ranks that do not train yet; afterwards nothing on ranks that do not train any more. module: on
// ranks that train, the training's; on others one of the same kind, whose values do not matter. group: the ranks that
// continue; nothing on others. job: a group with all ranks that train before or after. Parameters of ranks that
// leave have no values any more where their memory was the strategy's. Collective over `job`. Throws as
// Training::replan(), on every rank; UsageError also for a `group`, or a training, with ranks that are not in
// `job`.
template <class Module>
Replanned replan(std::optional<Training<Module>>& training, const std::string& strategy,
                 const std::shared_ptr<Module>& module, const OptimizerRecipe& recipe,
                 const std::optional<Group>& group, const Group& job, const TrainingOptions& options = {}) {
  auto core = training ? std::move(*training).release() : nullptr;
  const auto put_back = [&] {
    training.reset();
    if (core) training.emplace(module, std::move(core));
  };
  try {
    auto done = replan_core(core, strategy, module, recipe, group, job, options);
    put_back();
    return done;
  } catch (...) {
    put_back();
    throw;
  }
}
template <class Module>
Replanned replan(std::optional<Training<Module>>& training, const std::string& strategy,
                 const torch::nn::ModuleHolder<Module>& module, const OptimizerRecipe& recipe,
                 const std::optional<Group>& group, const Group& job, const TrainingOptions& options = {}) {
  return replan(training, strategy, module.ptr(), recipe, group, job, options);
}

}  // namespace shoal
