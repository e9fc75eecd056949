// OptimizerInBackward (DDP18): equal to a separate step, wherever gradients come from; wrong use.

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include "shoal/error.h"
#include "shoal/hooks.h"
#include "shoal/join.h"
#include "tests/strategy/ddp/in_backward_training.h"
#include "tests/support/refusal.h"

namespace shoal::test::optimizer_in_backward_test {
namespace {

using Options = DistributedDataParallelOptions;
using Training = InBackwardTraining<MlpImpl>;

// Trains both ways with the same `pass(training, step)`.
template <class Module, class Pass>
void expect_same_training(const std::function<std::shared_ptr<Module>()>& model, const MakeOptimizer& make,
                          const std::function<Options()>& options, const Pass& pass) {
  InBackwardTraining<Module> after(model(), make, std::nullopt, options());
  InBackwardTraining<Module> inside(model(), make, OptimizerInBackwardOptions(), options());
  const auto start = copies(*inside.model);
  for (int64_t step = 0; step < 5; ++step) {
    for (auto* training : {&after, &inside}) {
      pass(*training, step);
      training->end_step();
    }
    expect_equal(inside.model->parameters(), after.model->parameters());
    for (const auto& parameter : inside.model->parameters()) {
      if (!parameter.grad().defined()) continue;
      EXPECT_THROW(parameter.grad().sum(), UsageError) << step;
    }
  }
  EXPECT_GT(difference(start, inside.model->parameters()), 1e-3) << "it has trained";
}

std::shared_ptr<MlpImpl> mlp() {
  return seeded(3).ptr();
}

TEST(OptimizerInBackward, DDP18_what_reads_a_used_gradient_is_told_what_to_call) {
  Training training(mlp(), momentum_sgd(), OptimizerInBackwardOptions());
  InBackwardTraining<MlpImpl> alike(mlp(), momentum_sgd(), OptimizerInBackwardOptions());
  for (int64_t step = 0; step < 4; ++step) {
    for (auto* one : {&training, &alike}) {
      {
        const auto scope = one->parallel.no_sync();
        mean_loss(one->parallel.forward(batch(group().rank(), step, 1))).backward();
        EXPECT_NO_THROW(one->model->first->weight.grad().sum()) << "this rank's own";
      }
      mean_loss(one->parallel.forward(batch(group().rank(), step))).backward();
    }
    for (const auto& act :
         std::vector<std::function<void()>>{[&] { torch::nn::utils::clip_grad_norm_(training.model->parameters(), 1); },
                                            [&] { training.model->first->weight.grad().norm(); },
                                            [&] { torch::optim::SGD(training.model->parameters(), 0.1).step(); }}) {
      const auto text = test::refusal(act);
      EXPECT_NE(text.find("which OptimizerInBackward has used"), std::string::npos) << text;
      EXPECT_NE(text.find("clip_grad"), std::string::npos) << text;
    }
    step % 2 == 0 ? training.optimizer->zero_grad(step == 0) : training.model->zero_grad(step == 1);
    expect_equal(training.model->parameters(), alike.model->parameters());
  }
  mean_loss(training.parallel.forward(batch(group().rank(), 9))).backward();
  training.model->first->weight.grad().zero_();
  const auto text = test::refusal([&] { mean_loss(training.parallel.forward(batch(group().rank(), 10))).backward(); });
  EXPECT_NE(text.find("OptimizerInBackward: after the last backward, the gradient of parameter first.weight"),
            std::string::npos)
      << text;
}

TEST(OptimizerInBackward, DDP18_equals_the_separate_step_with_one_and_with_three_micro_batches) {
  for (const auto& make : {momentum_sgd(), adamw()}) {
    for (const bool view : {true, false}) {
      for (const int64_t micros : {1, 3}) {
        const auto options = [&] {
          auto chosen = small_buckets();
          chosen.gradient_as_bucket_view = view;
          return chosen;
        };
        expect_same_training<MlpImpl>(mlp, make, options, [&](Training& training, int64_t step) {
          for (int64_t micro = 0; micro < micros; ++micro) {
            const auto scope = training.parallel.no_sync(micro + 1 < micros);
            mean_loss(training.parallel.forward(batch(group().rank(), step, micro))).backward();
          }
        });
      }
    }
  }
}

TEST(OptimizerInBackward, BEY04_equals_the_separate_step_with_uneven_weights) {
  expect_same_training<MlpImpl>(mlp, momentum_sgd(), small_buckets, [](Training& training, int64_t step) {
    for (int64_t micro = 0; micro < 2; ++micro) {
      const auto samples = 1 + (group().rank() + micro + step) % 3;
      const auto scope = training.parallel.no_sync(micro == 0);
      const auto loss = training.parallel.forward(batch(group().rank(), step, micro, samples)).pow(2).sum();
      training.parallel.backward(loss, static_cast<double>(samples));
    }
  });
}

TEST(OptimizerInBackward, DDP18_equals_the_separate_step_under_communication_hooks) {
  const auto pass = [](Training& training, int64_t step) {
    mean_loss(training.parallel.forward(batch(group().rank(), step))).backward();
  };
  const auto with = [](const std::function<std::shared_ptr<CommunicationHook>()>& make) {
    return [make] {
      auto options = small_buckets();
      options.communication_hook = make();
      return options;
    };
  };
  expect_same_training<MlpImpl>(mlp, momentum_sgd(), with([] { return std::make_shared<CompressHook>(at::kBFloat16); }),
                                pass);
  expect_same_training<MlpImpl>(mlp, momentum_sgd(), with([] {
                                  return std::make_shared<PowerSgdHook>(
                                      PowerSgdOptions{.rank = 2, .start_iteration = 2, .min_compression_rate = 0});
                                }),
                                pass);
}

// Model with parts that differ between ranks, an unused part, a frozen one, and sparse gradients.
struct PartsImpl : torch::nn::Module {
  PartsImpl() {
    torch::manual_seed(5);
    words = register_module("words", torch::nn::Embedding(torch::nn::EmbeddingOptions(7, 12).sparse(true)));
    even = register_module("even", torch::nn::Linear(12, 12));
    odd = register_module("odd", torch::nn::Linear(12, 12));
    idle = register_module("idle", torch::nn::Linear(12, 12));
    last = register_module("last", torch::nn::Linear(12, 3));
    to(at::kDouble);
    last->bias.requires_grad_(false);
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& tokens) {
    const auto seen = x + words(tokens);
    return last(torch::tanh(group().rank() % 2 == 0 ? even(seen) : odd(seen)));
  }
  torch::nn::Embedding words{nullptr};
  torch::nn::Linear even{nullptr}, odd{nullptr}, idle{nullptr}, last{nullptr};
};

TEST(OptimizerInBackward, BEY02_equals_the_separate_step_where_ranks_run_different_modules) {
  const auto options = [] {
    auto chosen = small_buckets();
    chosen.find_unused_parameters = true;
    return chosen;
  };
  // Weight decay would move a parameter without a gradient if it were taken for one with a zero gradient.
  const auto make = [](std::vector<at::Tensor> parameters) {
    return std::make_unique<torch::optim::SGD>(std::move(parameters), torch::optim::SGDOptions(0.1).weight_decay(0.1));
  };
  const auto idle = PartsImpl().idle->weight.detach().clone();
  const auto start = [] { return std::make_shared<PartsImpl>(); };
  const auto plain = [](std::vector<at::Tensor> parameters) {
    return std::make_unique<torch::optim::SGD>(std::move(parameters), torch::optim::SGDOptions(0.1));
  };
  std::shared_ptr<PartsImpl> trained;
  const auto pass = [&](InBackwardTraining<PartsImpl>& training, int64_t step) {
    const auto tokens = at::full({4}, (group().rank() + step) % 7, at::kLong);
    training.parallel.forward(batch(group().rank(), step), tokens).pow(2).mean().backward();
    trained = training.model;
  };
  expect_same_training<PartsImpl>(start, plain, options, pass);
  EXPECT_TRUE(at::equal(trained->idle->weight, idle));
  // Decay does not support sparse gradients.
  const auto frozen = [&] {
    auto model = start();
    model->words->weight.requires_grad_(false);
    return model;
  };
  expect_same_training<PartsImpl>(frozen, make, options, pass);
  EXPECT_TRUE(at::equal(trained->idle->weight, idle));
}

TEST(OptimizerInBackward, BEY03_ranks_that_have_run_out_update_with_the_others) {
  Training after(mlp(), momentum_sgd(), std::nullopt);
  Training inside(mlp(), momentum_sgd(), OptimizerInBackwardOptions());
  for (auto* training : {&after, &inside}) {
    Join join({training->parallel});
    for (int64_t step = 0; join.next(step < 3 + group().rank()); ++step) {
      if (join.active()) {
        mean_loss(training->parallel.forward(batch(group().rank(), step))).backward();
      } else {
        training->parallel.shadow();
      }
      training->end_step();
    }
  }
  expect_equal(inside.model->parameters(), after.model->parameters());
}

TEST(OptimizerInBackward, DDP18_wrong_use_is_refused) {
  auto model = mlp();
  DistributedDataParallel<MlpImpl> parallel(model, group());
  const auto refused = [&](torch::optim::Optimizer& optimizer, const OptimizerInBackwardOptions& options,
                           const std::string& names) {
    try {
      const OptimizerInBackward inside(parallel, optimizer, options);
      ADD_FAILURE() << "accepted: " << names;
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find(names), std::string::npos) << error.what();
    }
  };
  const auto good = momentum_sgd()(model->parameters());
  refused(*good, {.clip_grad = -1}, "clip_grad is -1");
  refused(*momentum_sgd()(model->first->parameters()), {}, "does not have parameter second.weight");
  auto more = model->parameters();
  more.push_back(at::zeros({2}, at::requires_grad()));
  refused(*momentum_sgd()(more), {}, "1 parameter(s) that this wrapper does not train");
  if (group().size() > 1) {
    const OptimizerInBackwardOptions differs{.clip_grad = group().rank() == 0 ? 1.0 : 2.0};
    EXPECT_THROW(OptimizerInBackward(parallel, *good, differs), DisagreeError);
  }
  {
    const OptimizerInBackward inside(parallel, *good);
    mean_loss(parallel.forward(batch(group().rank(), 0))).backward();
  }
  EXPECT_THROW(mean_loss(parallel.forward(batch(group().rank(), 1))).backward(), UsageError) << "it has gone";
  refused(*good, {}, "before the first step");
}

}  // namespace
}  // namespace shoal::test::optimizer_in_backward_test
