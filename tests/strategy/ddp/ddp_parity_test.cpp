// DDP02 on the built-in models in float64, which shows errors that float32 would hide.

#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include "data/reference.h"
#include "models/loss.h"
#include "models/registry.h"
#include "shoal/ddp.h"
#include "tests/support/models.h"
#include "tests/support/world.h"

namespace shoal::ddp_parity_test {
namespace {

using test::difference;
using test::group;

std::unique_ptr<torch::optim::Optimizer> optimizer_for(const std::string& name, std::vector<at::Tensor> parameters) {
  if (name == "adamw") {
    return std::make_unique<torch::optim::AdamW>(std::move(parameters),
                                                 torch::optim::AdamWOptions(1e-3).weight_decay(0.1));
  }
  return std::make_unique<torch::optim::SGD>(std::move(parameters), torch::optim::SGDOptions(0.01).momentum(0.9));
}

void compare(const std::string& name, const std::string& optimizer_name, int micros) {
  const auto make = [&] { return models::make_model(name, "tiny", models::Init::reference, 1, at::kDouble); };
  const auto model = make();
  const auto reference = make();
  DistributedDataParallel parallel(model, group());
  const auto optimizer = optimizer_for(optimizer_name, model->parameters());
  const auto reference_optimizer = optimizer_for(optimizer_name, reference->parameters());
  const auto loss_of = [&](const auto& forward, int rank, int64_t step, int micro) {
    const auto batch = data::reference_batch(name, "tiny",
                                             {.seed = 1,
                                              .step = static_cast<uint64_t>(step),
                                              .rank = static_cast<uint64_t>(rank),
                                              .micro = static_cast<uint64_t>(micro)},
                                             2, at::kDouble);
    return models::loss_of(forward(batch.data), batch.target);
  };
  for (int64_t step = 0; step < 10; ++step) {
    for (int micro = 0; micro < micros; ++micro) {
      const auto scope = parallel.no_sync(micro + 1 < micros);
      const auto loss = loss_of([&](const at::Tensor& x) { return parallel.forward(x); }, group().rank(), step, micro);
      (loss / micros).backward();
      for (int rank = 0; rank < group().size(); ++rank) {
        const auto part = loss_of([&](const at::Tensor& x) { return reference->forward(x); }, rank, step, micro);
        (part / (micros * group().size())).backward();
      }
    }
    ASSERT_LT(difference(test::gradients(*model), test::gradients(*reference)), 1e-12) << "gradients, step " << step;
    optimizer->step();
    optimizer->zero_grad();
    reference_optimizer->step();
    reference_optimizer->zero_grad();
  }
  EXPECT_LT(difference(model->parameters(), reference->parameters()), 1e-12);
}

TEST(DdpParity, DDP01_mlp_cnn_and_gpt_train) {
  for (const auto* name : {"mlp", "cnn", "gpt"}) {
    const auto model = models::make_model(name, "tiny", models::Init::reference, 1);
    DistributedDataParallel parallel(model, group());
    const auto optimizer = optimizer_for("adamw", model->parameters());
    const auto batch = data::reference_batch(name, "tiny", {.rank = static_cast<uint64_t>(group().rank())}, 8);
    std::vector<double> losses;
    for (int step = 0; step < 20; ++step) {
      const auto loss = models::loss_of(parallel.forward(batch.data), batch.target);
      loss.backward();
      optimizer->step();
      optimizer->zero_grad();
      losses.push_back(loss.item<double>());
    }
    EXPECT_LT(losses.back(), 0.9 * losses.front()) << name;
  }
}

struct ManyArguments : torch::nn::Module {
  ManyArguments() { layer = register_module("layer", torch::nn::Linear(2, 2)); }
  std::pair<at::Tensor, std::string> forward(const at::Tensor& x, double factor, std::unique_ptr<int> count) {
    return {layer(x) * factor * *count, "as the module returned it"};
  }
  torch::nn::Linear layer{nullptr};
};

TEST(DdpParity, DDP01_forward_passes_any_arguments_and_returns_what_the_module_returns) {
  DistributedDataParallel parallel(std::make_shared<ManyArguments>(), group());
  const auto [tensor, text] = parallel.forward(at::ones({1, 2}), 2.0, std::make_unique<int>(3));
  EXPECT_TRUE(at::equal(tensor, parallel->layer(at::ones({1, 2})) * 6));
  EXPECT_EQ(text, "as the module returned it");
  torch::nn::Sequential holder(torch::nn::Linear(2, 2));
  DistributedDataParallel wrapped(holder, group());
  EXPECT_TRUE(at::equal(wrapped.forward(at::ones({1, 2})), holder->forward(at::ones({1, 2}))));
}

TEST(DdpParity, DDP02_mlp_equals_one_process_in_float64) {
  for (const int micros : {1, 3}) {
    compare("mlp", "sgd_momentum", micros);
    compare("mlp", "adamw", micros);
  }
}

TEST(DdpParity, DDP02_gpt_equals_one_process_in_float64) {
  compare("gpt", "sgd_momentum", 3);
  compare("gpt", "adamw", 1);
}

}  // namespace
}  // namespace shoal::ddp_parity_test
