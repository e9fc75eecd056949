#pragma once
// Registry of strategies: their names, options and help texts, and strategies of a program's own. Programs whose users
// choose a strategy take all of it from here; shoal/training.h makes the training.

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "shoal/decentralized.h"
#include "shoal/error.h"
#include "shoal/group.h"
#include "shoal/hooks.h"
#include "shoal/optimizer_recipe.h"
#include "shoal/precision.h"
#include "shoal/wrap_policy.h"

namespace shoal {

class TrainingCore;

// Option of a strategy, given as text.
struct StrategyOption {
  enum class Type { flag, integer, number, text };  // flag: "true" or "false"

  std::string name;
  Type type = Type::text;
  std::string default_value{};
  std::string help{};
  std::vector<std::string> choices{};  // of a text; empty: any text is valid
  std::optional<double> minimum{};     // of an integer or a number
  std::string implicit_value{};        // of the option without a value; empty: it needs a value
};

// Values by name of the option.
using StrategyOptions = std::map<std::string, std::string>;

// Error for an option that is unknown, belongs to another strategy, or has an invalid value. what() is option()
// followed by fault(), so that a program can spell the option as its users write it.
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

// Values of a strategy's options, including defaults.
class OptionValues {
 public:
  // StrategyOptionError for invalid options.
  OptionValues(const std::vector<StrategyOption>& known, const StrategyOptions& given);

  bool flag(const std::string& name) const { return text(name) == "true"; }
  int64_t integer(const std::string& name) const;
  int count(const std::string& name) const;  // an integer that an int holds: StrategyOptionError for others
  double number(const std::string& name) const;
  const std::string& text(const std::string& name) const;
  bool given(const std::string& name) const { return given_.contains(name); }

 private:
  StrategyOptions given_;
  StrategyOptions values_;
};

struct TrainingOptions {
  StrategyOptions options{};          // options of the strategy
  double clip_grad = 0;               // maximum norm of all gradients together; 0: no clipping
  Precision precision{};              // see precision_of(); the module already has its dtype
  std::optional<WrapPolicy> units{};  // for strategies that shard by units; none: the module is one unit
  // Only with Strategy::takes_schedule; otherwise make a schedule for optimizer().
  ScheduleFactory schedule{};
  uint64_t seed = 0;                                        // for random topologies
  std::vector<std::string> ignored{};                       // names of parameters and buffers that shoal ignores
  std::shared_ptr<CommunicationHook> communication_hook{};  // replaces the option compress, for strategies that have it
};

struct Strategy;

// Arguments of Strategy::make.
struct TrainingParts {
  const Strategy& strategy;
  std::shared_ptr<torch::nn::Module> module;
  OptimizerRecipe recipe;
  Group group;
  TrainingOptions options;
  OptionValues values;
};

// How the ranks' steps go together.
enum class Synchronization {
  lockstep,      // all ranks make every step together, and end together
  asynchronous,  // each rank makes its own steps, mixes with a few others, and continues without those that end
  independent,   // ranks train independently
  single_rank,   // there is only one rank
};

// Strategy of the registry.
struct Strategy {
  std::string name;
  std::string help;  // a few words
  std::vector<StrategyOption> options{};
  Synchronization synchronization = Synchronization::lockstep;
  bool main_copies = false;   // updates float32 copies of 16-bit parameters
  bool logging_data = false;  // TrainingCore::logging_data() returns a report
  // What it does with TrainingOptions; make_training() refuses the options that a strategy does not take.
  bool takes_schedule = false;   // steps its optimizers itself, with a schedule
  bool takes_clip_grad = false;  // step() clips to clip_grad, as all of the library's own do
  bool takes_scaler = false;     // scale_loss() and step() use precision.scaler, as all of the library's own do
  bool elastic = false;          // shoal::Elastic (shoal/elastic.h) takes its training
  bool takes_deferred = false;   // materializes the parameters of a DeferredInit scope itself, part by part
  // Throws StrategyOptionError or UsageError for faults that are known before the ranks start. hosts: number of the
  // ranks' hosts; none: not known yet.
  std::function<void(const OptionValues& values, const TrainingOptions& options, int ranks, std::optional<int> hosts)>
      check{};
  std::function<std::unique_ptr<TrainingCore>(const TrainingParts& parts)> make{};

  bool has(const std::string& option) const;
};

// All strategies, in the order of help texts.
std::vector<std::string> strategy_names();
// Names of those that shoal::Elastic takes.
std::vector<std::string> elastic_strategies();
// UsageError, which lists all names, for an unknown one.
const Strategy& find_strategy(const std::string& name);
// Adds a strategy of the program's own. UsageError for a name that is taken, for a missing `make`, and for an option
// that has another type in another strategy. Not thread-safe.
void register_strategy(Strategy strategy);
// Names of the strategies that have the option.
std::vector<std::string> strategies_with(const std::string& option);
// StrategyOptionError for wrong values, and for an option that the strategy does not have; it names the strategies that
// do.
OptionValues option_values(const Strategy& strategy, const StrategyOptions& options);

// Precision for float32, float64, bf16_mixed, fp16_mixed, bf16 or bf16_pure under the strategy: with float32 main
// copies, mixed means 16-bit parameters; without, it means computing in 16 bits. bf16: bfloat16 parameters with float32
// copies; bf16_pure: without, for strategies that keep none, where small updates are lost. UsageError for another name,
// and for these two under a strategy of the other kind.
Precision precision_of(const std::string& strategy, const std::string& name);
std::vector<std::string> precision_names();
// Names that precision_of() takes under the strategy.
std::vector<std::string> precision_names(const std::string& strategy);

}  // namespace shoal
