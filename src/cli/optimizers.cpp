#include "cli/optimizers.h"

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "shoal/base/error.h"

namespace shoal::cli {

std::vector<std::string> optimizer_names() {
  return {"adamw", "adam", "sgd", "sgd_momentum"};
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const std::string& name, std::vector<at::Tensor> parameters,
                                                        std::optional<double> lr) {
  using namespace torch::optim;
  if (name == "adamw") {
    return std::make_unique<AdamW>(std::move(parameters), AdamWOptions(lr.value_or(1e-3)).weight_decay(0.1));
  }
  if (name == "adam") return std::make_unique<Adam>(std::move(parameters), AdamOptions(lr.value_or(1e-3)));
  if (name == "sgd") return std::make_unique<SGD>(std::move(parameters), SGDOptions(lr.value_or(0.05)));
  if (name == "sgd_momentum") {
    return std::make_unique<SGD>(std::move(parameters), SGDOptions(lr.value_or(0.01)).momentum(0.9));
  }
  throw UsageError("unknown optimizer " + name);
}

}  // namespace shoal::cli
