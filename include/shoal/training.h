#pragma once
// Strategies by name: a module, an optimizer and a name give an object with what a training loop needs. Programs that
// let their users choose take the names, the options and the help texts from here.

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "shoal/checkpoint.h"
#include "shoal/decentralized.h"
#include "shoal/detail/data_parallel.h"
#include "shoal/detail/inputs.h"
#include "shoal/detail/local_optimizer.h"
#include "shoal/detail/optimizer_state.h"
#include "shoal/detail/sharded_optimizer.h"
#include "shoal/error.h"
#include "shoal/group.h"
#include "shoal/hooks.h"
#include "shoal/join.h"
#include "shoal/optim.h"
#include "shoal/precision.h"
#include "shoal/telemetry.h"
#include "shoal/wrap_policy.h"

namespace shoal {

// An option of a strategy, given as text.
struct StrategyOption {
  enum class Type { flag, integer, number, text };  // flag: "true" or "false"

  std::string name;
  Type type = Type::text;
  std::string default_value{};
  std::string help{};
  std::vector<std::string> choices{};  // of a text; empty: any
  std::optional<double> least{};       // of an integer or a number
  std::string alone{};                 // what naming it without a value means; empty: it needs one
};

// By name of the option.
using StrategyOptions = std::map<std::string, std::string>;

// An option that is unknown, of another strategy, or has a value that does not fit. what() is option() and fault() in a
// row, so that a program can spell the option as its users write it.
class StrategyOptionError : public UsageError {
 public:
  StrategyOptionError(const std::string& option, const std::string& fault)
      : UsageError(option + fault), option_(option), fault_(fault) {}
  const std::string& option() const { return option_; }
  const std::string& fault() const { return fault_; }

 private:
  std::string option_;
  std::string fault_;
};

// The values of a strategy's options, with defaults for those that are not given.
class OptionValues {
 public:
  // StrategyOptionError for what does not fit.
  OptionValues(const std::vector<StrategyOption>& known, const StrategyOptions& given);

  bool flag(const std::string& name) const { return text(name) == "true"; }
  int64_t integer(const std::string& name) const;
  double number(const std::string& name) const;
  const std::string& text(const std::string& name) const;
  bool given(const std::string& name) const { return given_.contains(name); }

 private:
  StrategyOptions given_;
  StrategyOptions values_;
};

// An optimizer that is still to get its parameters: sharded strategies make one per rank, on pieces of them.
struct OptimizerRecipe {
  using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;

  std::function<ParamGroups(const torch::nn::Module& module)> groups{};  // none: one of all trainable parameters
  std::shared_ptr<const torch::optim::OptimizerOptions> defaults{};
  std::function<std::unique_ptr<torch::optim::Optimizer>(const ParamGroups& groups)> make{};
  bool element_wise = false;
};

//   shoal::optimizer_recipe<shoal::FusedAdamW>(torch::optim::AdamWOptions(1e-3)), or of a learning rate alone
template <class Optimizer, class Defaults>
OptimizerRecipe optimizer_recipe(const Defaults& defaults, decltype(OptimizerRecipe::groups) groups = {}) {
  return {.groups = std::move(groups),
          .defaults = detail::default_options<Optimizer>(defaults),
          .make = detail::local_optimizer_maker<Optimizer>(defaults),
          .element_wise = element_wise<Optimizer>};
}

struct TrainingOptions {
  StrategyOptions options{};              // the strategy's own
  double clip_grad = 0;                   // largest norm of all gradients together; 0: no clipping
  Precision precision{};                  // see precision_of(); the module has its dtype already
  std::optional<WrapPolicy> units{};      // of strategies that shard by units; none: the module is one
  ScheduleOf schedule{};                  // where Strategy::takes_schedule; elsewhere make one of optimizer()
  uint64_t seed = 0;                      // of random topologies
  std::vector<std::string> ignored{};     // names of parameters and buffers that shoal leaves alone
  std::shared_ptr<CommunicationHook> communication_hook{};  // of strategies with the option compress, in its place
};

struct Strategy;

// What strategies are made of.
struct TrainingParts {
  const Strategy& strategy;
  std::shared_ptr<torch::nn::Module> module;
  OptimizerRecipe recipe;
  Group group;
  TrainingOptions options;
  OptionValues values;
};

// A module under a strategy, whatever the module's type. Methods do what those of the strategy's wrapper and optimizer
// do; one that a strategy does not have is a UsageError.
class TrainingCore {
 public:
  explicit TrainingCore(const TrainingParts& parts);
  virtual ~TrainingCore() = default;
  TrainingCore(const TrainingCore&) = delete;
  TrainingCore& operator=(const TrainingCore&) = delete;

  // Backward of a micro-batch's loss, scaled where there is a scaler. Under no_sync() for all but a step's last.
  void backward(const at::Tensor& loss) { scale_loss(loss).backward(); }
  // Of a loss that is a sum over `weight` samples; see DataParallelCore::backward.
  virtual void backward(const at::Tensor& loss_sum, double weight);
  virtual at::Tensor scale_loss(const at::Tensor& loss) const;
  [[nodiscard]] virtual NoSync no_sync(bool accumulate = true);
  // Unscales, clips and updates, where backward has not done so; whether it updated.
  virtual bool step() = 0;
  virtual void zero_grad() { optimizer().zero_grad(); }
  // After an exception in a step; see DataParallelCore::abandon_step.
  virtual void abandon_step() {}
  // For Join.
  virtual Joinable& joinable();

  // What schedules change and steps use; where the strategy steps by itself, an optimizer that shows the rates.
  virtual torch::optim::Optimizer& optimizer() = 0;
  // The optimizers that hold this rank's state.
  virtual std::vector<const torch::optim::Optimizer*> local_optimizers() const = 0;
  // The whole optimizer's state by name. Collective where it is sharded.
  virtual OptimizerState optimizer_state() = 0;
  // For checkpoints; none for ranks that know nothing of each other.
  virtual std::optional<TrainingState> state() = 0;

  // What this rank holds of the parameters, and, after a backward, of the gradients.
  virtual std::vector<at::Tensor> parameters() const { return module_->parameters(); }
  virtual std::vector<at::Tensor> gradients() const;
  // While it lives, every rank can read all parameters, to evaluate and to save them. Collective, at both ends.
  virtual std::shared_ptr<void> full_parameters() { return nullptr; }
  // Whether this rank can read all parameters without the others.
  virtual bool has_whole_model() const { return true; }

  // The ranks that make every step together; none: all.
  virtual std::optional<Group> bound() const { return std::nullopt; }
  // The ranks that are still there; none: all. Collective over them.
  virtual std::optional<Group> present() { return std::nullopt; }
  // The first rank that is still there, as far as this one knows.
  virtual int leader() const { return 0; }
  // Statistics of exchanges between neighbours, and how far models are from their mean; none: there are no such
  // exchanges. distance: collective.
  virtual const ExchangeStatistics* exchanges() const { return nullptr; }
  virtual double consensus_distance() { return 0; }
  // Of the wrapper; none: there is none.
  virtual std::optional<LoggingData> logging_data() const { return std::nullopt; }
  // Names of the parameters in each; empty where nothing is reduced in buckets.
  virtual std::vector<std::vector<std::string>> buckets() const { return {}; }

  const Strategy& strategy() const { return strategy_; }
  const Group& group() const { return group_; }

  // Around the module's forward, as for DataParallelCore.
  virtual void before_forward() {}
  virtual void after_forward(const std::vector<at::Tensor>& /*outputs*/) {}
  virtual void forward_failed() {}
  virtual const Precision& precision() const { return precision_; }
  at::DeviceType device() const { return device_; }
  virtual TensorCast input_cast() const { return {}; }

 protected:
  [[noreturn]] void lacks(const std::string& what) const;

  const Strategy& strategy_;
  std::shared_ptr<torch::nn::Module> module_;
  Group group_;
  double clip_grad_;
  Precision precision_;

 private:
  at::DeviceType device_;
};

// Which ranks make steps together.
enum class Pace {
  common,  // all of them; they end together
  own,     // each makes its own, averages with a few others, and goes on without those that end
  alone,   // ranks know nothing of each other
  single,  // there is one rank
};

// A strategy by name.
struct Strategy {
  std::string name;
  std::string help;  // a few words
  std::vector<StrategyOption> options{};
  Pace pace = Pace::common;
  bool main_copies = false;   // updates float32 copies of 16-bit parameters
  bool logging_data = false;  // TrainingCore::logging_data() has something to say
  bool takes_schedule = false;  // steps its optimizers itself, with a schedule
  // Throws StrategyOptionError or UsageError for what can be known to fail before the ranks are there. hosts: that the
  // ranks run on; none: not known yet.
  std::function<void(const OptionValues& values, const TrainingOptions& options, int ranks, std::optional<int> hosts)>
      check{};
  std::function<std::unique_ptr<TrainingCore>(const TrainingParts& parts)> make{};

  bool has(const std::string& option) const;
};

// In the order in which help texts list them.
std::vector<std::string> strategy_names();
// UsageError, with all names, for an unknown one.
const Strategy& find_strategy(const std::string& name);
// A strategy of the program's own, for all that comes later. UsageError for a name that is taken, without a `make`, and
// for an option that another strategy has with another type. Not thread-safe.
void register_strategy(Strategy strategy);
// Names of the strategies that have the option.
std::vector<std::string> strategies_with(const std::string& option);
// StrategyOptionError for an option that the strategy does not have, which names those that do, and for wrong values.
OptionValues option_values(const Strategy& strategy, const StrategyOptions& options);

// float32, float64, bf16_mixed, fp16_mixed or bf16 as the strategy does it: where float32 main copies are kept, mixed
// means parameters of 16 bits, elsewhere computing in 16 bits. UsageError for another name.
Precision precision_of(const std::string& strategy, const std::string& name);
std::vector<std::string> precision_names();

// What make_training() does, for a module of any type: for bindings. Collective.
std::unique_ptr<TrainingCore> make_training_core(const std::string& strategy, std::shared_ptr<torch::nn::Module> module,
                                                 OptimizerRecipe recipe, const Group& group,
                                                 const TrainingOptions& options = {});

// A module under a strategy, and the optimizer that goes with it.
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

  // What the module's own forward returns, if anything.
  template <class... Arguments>
  auto forward(Arguments&&... arguments) {
    return detail::with_cast_inputs<Module>(
        std::index_sequence_for<Arguments...>(), core_->input_cast(),
        [this](auto&&... inputs) { return forward_of_module(std::forward<decltype(inputs)>(inputs)...); },
        std::forward<Arguments>(arguments)...);
  }

  // The same as forward().
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    return forward(std::forward<Arguments>(arguments)...);
  }

  const std::shared_ptr<Module>& module() const { return module_; }
  TrainingCore* operator->() const { return core_.get(); }
  TrainingCore& operator*() const { return *core_; }

 private:
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

// Collective, except under strategies whose ranks know nothing of each other. Errors as the strategy's own, and those of
// find_strategy() and option_values(). UsageError for a recipe without `defaults` or `make`, and for a schedule or a
// communication hook that the strategy would not use.
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

}  // namespace shoal
