// Replan of a training that ignores some of its parameters.

#include <gmock/gmock.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "shoal/training.h"
#include "tests/support/models.h"
#include "tests/support/world.h"

namespace shoal::replan_ignored_test {
namespace {

using test::group;

// An expert and a scale of each rank's own.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(int rank) {
    torch::manual_seed(0);
    body = register_module("body", torch::nn::Linear(12, 6));
    torch::manual_seed(10 + rank);
    expert = register_module("expert", torch::nn::Linear(6, 2));
    scale = register_parameter("scale", at::full({2}, double(rank + 1)), false);
    seen = register_buffer("seen", at::full({2}, double(rank)));
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) { return expert(torch::tanh(body(x))) * scale; }
  torch::nn::Linear body{nullptr}, expert{nullptr};
  at::Tensor scale, seen;
};

TEST(Replan, BEY15_what_a_training_ignores_stays_as_it_is_on_each_rank) {
  const auto recipe = optimizer_recipe<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2));
  for (const std::string from : {"ddp", "zero2", "fsdp"}) {
    for (const std::string to : {"ddp", "megatron", "fsdp", "local_sgd"}) {
      SCOPED_TRACE(from + " to " + to);
      const auto model = std::make_shared<NetImpl>(group().rank());
      TrainingOptions options;
      options.ignored = {"expert.weight", "expert.bias", "scale", "seen"};
      auto training = make_training(from, model, recipe, group(), options);
      torch::optim::SGD own(model->expert->parameters(), 0.1);
      const auto step = [&](int64_t number) {
        training->backward(test::mean_loss(training.forward(test::batch(group().rank(), number))));
        training->step();
        own.step();
        training->zero_grad();
        own.zero_grad();
      };
      step(0);
      const std::vector<at::Tensor> mine{model->expert->weight, model->expert->bias, model->scale, model->seen};
      std::vector<at::Tensor> before;
      for (const auto& tensor : mine) before.push_back(tensor.detach().clone());
      EXPECT_THAT(training.replan(to, options).differences, testing::IsEmpty());
      EXPECT_EQ(test::difference(mine, before), 0);
      step(1);
      EXPECT_GT(test::difference({mine[0]}, {before[0]}), 0) << "goes on";
    }
  }
}

}  // namespace
}  // namespace shoal::replan_ignored_test
