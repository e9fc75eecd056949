#include "cli/optimizers.h"

#include "optim/state.h"
#include "shoal/base/error.h"
#include "shoal/optim/fused_adam.h"
#include "shoal/optim/fused_adamw.h"
#include "shoal/optim/fused_sgd.h"

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
  if (name == "adam") return std::make_unique<FusedAdam>(std::move(parameters), AdamOptions(lr.value_or(1e-3)));
  if (name == "sgd") return std::make_unique<FusedSGD>(std::move(parameters), SGDOptions(lr.value_or(0.05)));
  if (name == "sgd_momentum") {
    return std::make_unique<FusedSGD>(std::move(parameters), SGDOptions(lr.value_or(0.01)).momentum(0.9));
  }
  throw UsageError("unknown optimizer " + name);
}

std::vector<at::Tensor> state_tensors(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> all;
  for (const auto& [parameter, state] : optimizer.state()) {
    for (const auto& [name, tensor] : named_state(*state).tensors) all.push_back(tensor);
  }
  return all;
}

}  // namespace shoal::cli
