#include "cli/optimizers.h"

#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include "shoal/base/error.h"
#include "shoal/optim/fused_adamw.h"

namespace shoal::cli {

std::vector<std::string> optimizer_names() {
  return {"adamw", "adam", "sgd", "sgd_momentum"};
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name, std::vector<at::Tensor> parameters,
                                                        std::optional<double> lr) {
  using namespace torch::optim;
  if (name == "adamw") {
    return std::make_unique<FusedAdamW>(std::move(parameters), AdamWOptions(lr.value_or(1e-3)).weight_decay(0.1));
  }
  if (name == "adam") return std::make_unique<Adam>(std::move(parameters), AdamOptions(lr.value_or(1e-3)));
  if (name == "sgd") return std::make_unique<SGD>(std::move(parameters), SGDOptions(lr.value_or(0.05)));
  if (name == "sgd_momentum") {
    return std::make_unique<SGD>(std::move(parameters), SGDOptions(lr.value_or(0.01)).momentum(0.9));
  }
  throw UsageError("unknown optimizer " + name);
}

std::vector<at::Tensor> state_tensors(const torch::optim::Optimizer& optimizer) {
  using namespace torch::optim;
  std::vector<at::Tensor> all;
  for (const auto& [parameter, state] : optimizer.state()) {
    if (const auto* adamw = dynamic_cast<const AdamWParamState*>(state.get())) {
      all.insert(all.end(), {adamw->exp_avg(), adamw->exp_avg_sq(), adamw->max_exp_avg_sq()});
    } else if (const auto* adam = dynamic_cast<const AdamParamState*>(state.get())) {
      all.insert(all.end(), {adam->exp_avg(), adam->exp_avg_sq(), adam->max_exp_avg_sq()});
    } else if (const auto* sgd = dynamic_cast<const SGDParamState*>(state.get())) {
      all.push_back(sgd->momentum_buffer());
    }
  }
  std::erase_if(all, [](const at::Tensor& tensor) { return !tensor.defined(); });
  return all;
}

}  // namespace shoal::cli
