// ShardedDataParallel whose parameters are frozen and unfrozen while it trains (SDP06).

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>

#include "tests/strategy/zero/sharded_ddp_training.h"
#include "tests/support/refusal.h"

namespace shoal::test::sharded_ddp_freezing_test {
namespace {

TEST(ShardedDdp, SDP06_freezing_and_unfreezing_is_noticed_at_the_next_forward) {
  for (const bool automatic : {true, false}) {
    auto model = seeded(1);
    Reference reference(seeded(1));
    Sgd optimizer(model->parameters(), sgd, group());
    ShardedDataParallel parallel(model, optimizer, group(), {.auto_refresh_trainable = automatic});
    int64_t number = 0;
    for (const bool trainable : {true, false, true}) {
      for (auto* of : {&model, &reference.model()}) {
        for (auto& parameter : (*of)->second->parameters()) {
          parameter.requires_grad_(trainable);
          parameter.mutable_grad().reset();
        }
      }
      if (!automatic) {
        optimizer.refresh_trainable();
        parallel.refresh_trainable();
      }
      for (int i = 0; i < 2; ++i, ++number) {
        step(parallel, {&optimizer}, number);
        reference.step(number);
      }
      if (!trainable) break;
    }
    EXPECT_LT(difference(model->parameters(), reference.model()->parameters()), 1e-12);
    for (auto& parameter : model->second->parameters()) parameter.requires_grad_(true);
    if (!automatic) {
      optimizer.refresh_trainable();
      parallel.refresh_trainable();
    }
    const auto before = model->second->weight.detach().clone();
    step(parallel, {&optimizer}, 10);
    EXPECT_FALSE(at::equal(before, model->second->weight)) << "trains again";
  }
}

using Adam = OSS<torch::optim::Adam>;

void freeze(Mlp& model, bool first, bool others) {
  for (auto& item : model->named_parameters()) {
    const bool of_first = item.key().rfind("first.", 0) == 0;
    item.value().requires_grad_(!(of_first ? first : others));
  }
}

// What is frozen changes in every step, as a GAN's two halves do.
TEST(ShardedDdp, SDP06_freezing_per_step_keeps_state_and_equals_one_process) {
  auto model = seeded(1);
  auto reference = seeded(1);
  const torch::optim::AdamOptions options(1e-2);
  Adam optimizer(model->parameters(), options, group());
  torch::optim::Adam whole(reference->parameters(), options);
  ShardedDataParallel parallel(model, optimizer, group());
  for (int64_t number = 0; number < 12; ++number) {
    const bool even = number % 2 == 0;
    freeze(model, even, !even);
    freeze(reference, even, !even);
    mean_loss(parallel.forward(batch(group().rank(), number))).backward();
    optimizer.step();
    optimizer.zero_grad();
    for (int rank = 0; rank < group().size(); ++rank) {
      (mean_loss(reference->forward(batch(rank, number))) / group().size()).backward();
    }
    whole.step();
    whole.zero_grad();
  }
  EXPECT_LT(difference(model->parameters(), reference->parameters()), 1e-12);
  freeze(model, false, false);
  EXPECT_EQ(optimizer.state_dict(*model).at("first.weight").numbers.at("step"), 6);
}

// Layers of one size, so that ranks own as many of them each.
struct TowerImpl : torch::nn::Module {
  explicit TowerImpl(int count) {
    for (int i = 0; i < count; ++i) {
      const auto name = "layer" + std::to_string(i);
      layers.push_back(register_module(name, torch::nn::Linear(torch::nn::LinearOptions(12, 12).bias(false))));
    }
    to(at::kDouble);
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = x + torch::tanh(layer(x));
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};

// A rank's whole share is frozen and another layer unfrozen, before the forward or between backward and step: balanced
// shares would have other owners, but the gradients are where backward has left them.
TEST(ShardedDdp, SDP06_OSS09_freezing_and_unfreezing_before_clipping_equals_one_process) {
  for (const bool after_backward : {false, true}) {
    SCOPED_TRACE(after_backward ? "after backward" : "before forward");
    const auto made = [] {
      torch::manual_seed(4);
      auto model = std::make_shared<TowerImpl>(1 + 3 * group().size());
      model->layers[0]->weight.requires_grad_(false);
      return model;
    };
    const auto model = made(), reference = made();
    const torch::optim::AdamOptions options(1e-2);
    Adam optimizer(model->parameters(), options, group());
    torch::optim::Adam whole(reference->parameters(), options);
    ShardedDataParallel parallel(model, optimizer, group());
    std::vector<bool> of_rank_0{true};
    for (size_t i = 1; i < model->layers.size(); ++i) {
      of_rank_0.push_back(optimizer.param_to_rank(model->layers[i]->weight) == 0);
    }
    const auto freeze_share = [&](bool frozen) {
      for (const auto& of : {model, reference}) {
        for (size_t i = 0; i < of_rank_0.size(); ++i) {
          if (of_rank_0[i]) of->layers[i]->weight.requires_grad_(i == 0 || !frozen);
        }
      }
    };
    for (int64_t number = 0; number < 6; ++number) {
      const auto change = [&] {
        if (number == 1 || number == 3) freeze_share(number == 1);
      };
      if (!after_backward) change();
      mean_loss(parallel.forward(batch(group().rank(), number))).backward();
      for (int rank = 0; rank < group().size(); ++rank) {
        (mean_loss(reference->forward(batch(rank, number))) / group().size()).backward();
      }
      if (after_backward) change();
      const double norm = torch::nn::utils::clip_grad_norm_(reference->parameters(), 0.01);
      EXPECT_GT(norm, 0.01) << "clipping takes part";
      EXPECT_NEAR(optimizer.clip_grad_norm(0.01), norm, 1e-12) << "step " << number;
      optimizer.step();
      optimizer.zero_grad();
      whole.step();
      whole.zero_grad();
    }
    EXPECT_LT(difference(model->parameters(), reference->parameters()), 1e-10);
  }
}

// Once every pattern has been seen, a switch makes nothing anew: one small agreement and one small sum.
TEST(ShardedDdp, SDP06_a_switch_back_moves_no_parameters_and_frozen_gradients_do_not_travel) {
  auto log = std::make_shared<CallLog>();
  const auto recorded = group().recorded(log);
  auto model = seeded(1);
  Adam optimizer(model->parameters(), torch::optim::AdamOptions(1e-2), recorded);
  ShardedDataParallel parallel(model, optimizer, recorded, {.reduce_buffer_size = 20});
  int64_t number = 0;
  const auto train = [&](bool even) {
    freeze(model, even, !even);
    mean_loss(parallel.forward(batch(group().rank(), number++))).backward();
    optimizer.step();
    optimizer.zero_grad();
  };
  for (int i = 0; i < 4; ++i) train(i % 2 == 0);
  log->clear();
  train(true);
  int64_t trained = 0;
  for (const auto& parameter : model->parameters()) trained += parameter.requires_grad() ? parameter.numel() : 0;
  EXPECT_LE(log->bytes(Op::reduce), trained * 8 + 128 * 6);
  if (group().transport() == "tcp" || group().transport() == "gloo") {
    EXPECT_LE(log->bytes(Op::broadcast), trained * 8 + 128 * 6) << "what is frozen is not sent";
  } else {
    EXPECT_EQ(log->bytes(Op::broadcast), 0);
  }
}

TEST(ShardedDdp, SDP06_a_model_that_is_all_frozen_passes_gradients_on) {
  auto generator = seeded(2);
  auto generator_alone = seeded(2);
  torch::manual_seed(1);
  Mlp critic(5, 16, 5);
  torch::manual_seed(1);
  Mlp critic_alone(5, 16, 5);
  const torch::optim::AdamOptions options(1e-2);
  Adam of_generator(generator->parameters(), options, group());
  Adam of_critic(critic->parameters(), options, group());
  ShardedDataParallel parallel_generator(generator, of_generator, group());
  ShardedDataParallel parallel_critic(critic, of_critic, group());
  torch::optim::Adam generator_optimizer(generator_alone->parameters(), options);
  torch::optim::Adam critic_optimizer(critic_alone->parameters(), options);
  const auto set = [](Mlp& of, bool trainable) {
    for (auto& parameter : of->parameters()) parameter.requires_grad_(trainable);
  };
  for (int64_t number = 0; number < 6; ++number) {
    const auto x = batch(group().rank(), number);
    of_critic.zero_grad();
    mean_loss(parallel_critic.forward(parallel_generator.forward(x).detach())).backward();
    of_critic.step();
    set(critic, false);
    of_generator.zero_grad();
    parallel_critic.forward(parallel_generator.forward(x)).mean().backward();
    of_generator.step();
    set(critic, true);

    critic_optimizer.zero_grad();
    for (int rank = 0; rank < group().size(); ++rank) {
      const auto fake = generator_alone->forward(batch(rank, number)).detach();
      (mean_loss(critic_alone->forward(fake)) / group().size()).backward();
    }
    critic_optimizer.step();
    set(critic_alone, false);
    generator_optimizer.zero_grad();
    for (int rank = 0; rank < group().size(); ++rank) {
      (critic_alone->forward(generator_alone->forward(batch(rank, number))).mean() / group().size()).backward();
    }
    generator_optimizer.step();
    set(critic_alone, true);
  }
  EXPECT_LT(difference(critic->parameters(), critic_alone->parameters()), 1e-12);
  EXPECT_LT(difference(generator->parameters(), generator_alone->parameters()), 1e-11);
}

TEST(ShardedDdp, SDP06_without_auto_refresh_a_change_is_refused_by_name_until_the_wrapper_is_refreshed) {
  auto model = seeded(1);
  Reference reference(seeded(1));
  Sgd optimizer(model->parameters(), sgd, group());
  ShardedDataParallel parallel(model, optimizer, group(), {.auto_refresh_trainable = false});
  int64_t number = 0;
  for (const bool frozen : {true, false, true}) {
    for (auto* of : {&model, &reference.model()}) freeze(*of, false, frozen);
    const auto said = refusal([&] { parallel.forward(batch(group().rank(), number)); });
    EXPECT_THAT(said, testing::HasSubstr(frozen ? "parameter second.weight has been frozen" : "has been unfrozen"));
    EXPECT_THAT(said, testing::HasSubstr("call refresh_trainable()"));
    parallel.refresh_trainable();
    for (int i = 0; i < 2; ++i, ++number) {
      step(parallel, {&optimizer}, number);
      reference.step(number);
    }
  }
  EXPECT_LT(difference(model->parameters(), reference.model()->parameters()), 1e-12);
}

TEST(ShardedDdp, SDP06_micro_batches_of_a_parameter_that_is_frozen_since_are_reduced) {
  auto model = seeded(1);
  auto reference = seeded(1);
  Sgd optimizer(model->parameters(), sgd, group());
  ShardedDataParallel parallel(model, optimizer, group());
  torch::optim::SGD whole(reference->parameters(), sgd);
  for (int64_t number = 0; number < 4; ++number) {
    {
      const auto scope = parallel.no_sync();
      mean_loss(parallel.forward(batch(group().rank(), number))).backward();
    }
    freeze(model, true, false);
    mean_loss(parallel.forward(batch(group().rank(), number, 1))).backward();
    optimizer.step();
    optimizer.zero_grad();
    freeze(model, false, false);
    for (int64_t micro = 0; micro < 2; ++micro) {
      freeze(reference, micro == 1, false);
      for (int rank = 0; rank < group().size(); ++rank) {
        (mean_loss(reference->forward(batch(rank, number, micro))) / group().size()).backward();
      }
    }
    freeze(reference, false, false);
    whole.step();
    whole.zero_grad();
  }
  EXPECT_LT(difference(model->parameters(), reference->parameters()), 1e-12);
}

TEST(ShardedDdp, SDP06_a_parameter_unfrozen_before_wrapping_joins_the_optimizer) {
  auto model = seeded(1);
  Reference reference(seeded(1));
  freeze(model, true, false);
  Sgd optimizer(model->parameters(), sgd, group());
  freeze(model, false, false);
  ShardedDataParallel parallel(model, optimizer, group());
  for (int64_t number = 0; number < 3; ++number) {
    step(parallel, {&optimizer}, number);
    reference.step(number);
  }
  EXPECT_LT(difference(model->parameters(), reference.model()->parameters()), 1e-12);
}

}  // namespace
}  // namespace shoal::test::sharded_ddp_freezing_test
