#include "cli/strategies/optimizers.h"

#include <fmt/format.h>

#include "shoal/error.h"
#include "shoal/optim.h"

namespace shoal::cli {
namespace {

OptimizerRecipe::ParamGroups one_group(const torch::nn::Module& model) {
  OptimizerRecipe::ParamGroups groups;
  groups.emplace_back(model.parameters());
  return groups;
}

template <class Optimizer, class Options>
OptimizerRecipe kind(const Options& defaults, decltype(OptimizerRecipe::groups) groups = one_group) {
  return optimizer_recipe<Optimizer>(defaults, std::move(groups));
}

bool accumulates(const std::string& name) {
  return name == "accum_adam" || name == "accum_adamw";
}

}  // namespace

std::vector<std::string> optimizer_names() {
  return {"adamw", "adam",      "sgd",  "sgd_momentum", "adagrad",    "rmsprop",
          "lamb",  "adafactor", "muon", "accum_adam",   "accum_adamw"};
}

void check_optimizer(const TrainOptions& options) {
  if (!options.accum_iter) return;
  if (!accumulates(options.optimizer)) {
    throw UsageError(fmt::format("--accum-iter {}: is for --optimizer accum_adam and accum_adamw, not {}",
                                 *options.accum_iter, options.optimizer));
  }
  if (*options.accum_iter < 1) throw UsageError(fmt::format("--accum-iter {}: give at least 1", *options.accum_iter));
}

OptimizerRecipe recipe_of(const TrainOptions& options) {
  using namespace torch::optim;
  const auto& name = options.optimizer;
  const auto& lr = options.lr;
  if (name == "adamw") return kind<FusedAdamW>(AdamWOptions(lr.value_or(1e-3)).weight_decay(0.1));
  if (name == "adam") return kind<FusedAdam>(AdamOptions(lr.value_or(1e-3)));
  if (name == "sgd") return kind<FusedSGD>(SGDOptions(lr.value_or(0.05)));
  if (name == "sgd_momentum") return kind<FusedSGD>(SGDOptions(lr.value_or(0.01)).momentum(0.9));
  if (name == "adagrad") return kind<FusedAdagrad>(AdagradOptions(lr.value_or(1e-2)));
  if (name == "rmsprop") return kind<RMSprop>(RMSpropOptions(lr.value_or(1e-3)));
  if (name == "lamb") return kind<Lamb>(LambOptions(lr.value_or(1e-3)));
  if (name == "adafactor") return kind<Adafactor>(AdafactorOptions(lr.value_or(1e-2)));
  if (name == "muon") {
    const auto defaults = MuonOptions(lr.value_or(1e-3)).adjust_lr(MuonRate::match_rms_adamw);
    return kind<MuonWithAdamW>(defaults, MuonWithAdamW::groups_of);
  }
  if (accumulates(name)) {
    auto defaults = AccumAdamOptions(lr.value_or(1e-3));
    if (options.accum_iter) defaults.accum_iter(*options.accum_iter);
    return name == "accum_adam" ? kind<AccumAdam>(defaults) : kind<AccumAdamW>(defaults.weight_decay(0.1));
  }
  throw UsageError("unknown optimizer " + name);
}

int state_per_element(const std::string& name) {
  if (name == "sgd") return 0;
  if (name == "sgd_momentum" || name == "adagrad" || name == "rmsprop") return 1;
  if (name == "adamw" || name == "adam" || name == "lamb") return 2;
  if (accumulates(name)) return 3;
  throw UsageError(name + ": what it keeps depends on the parameters' shapes, not on their number alone");
}

}  // namespace shoal::cli
