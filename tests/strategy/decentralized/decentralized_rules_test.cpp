// DecentralizedDataParallel beyond the plain loop: accumulation, clipping, scaling, layouts, exceptions.

#include <torch/autograd.h>
#include <torch/nn/functional/linear.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>

#include "shoal/checkpoint.h"
#include "shoal/error.h"
#include "tests/strategy/decentralized/decentralized_ring.h"
#include "tests/support/refusal.h"

namespace shoal::decentralized_rules_test {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace): helpers of this folder's tests
using Options = DecentralizedDataParallelOptions;

TEST(Decentralized, DEC08_accumulation_and_evaluation_neither_update_nor_exchange) {
  auto simulation = simulated();
  auto model = seeded(1);
  DecentralizedDataParallel parallel(model, plain(), group(), {.topology = ring(), .bucket_cap_mb = small_bucket});
  for (int64_t step = 0; step < 6; ++step) {
    for (int64_t micro = 0; micro < 3; ++micro) {
      const auto scope = parallel.no_sync(micro < 2);
      const auto before = model->first->weight.detach().clone();
      (mean_loss(parallel.forward(batch(me(), step, micro))) / 3).backward();
      EXPECT_EQ(at::equal(model->first->weight, before), micro < 2);
      const torch::NoGradGuard no_grad;
      parallel.forward(batch(me(), step));
    }
    EXPECT_EQ(parallel.steps(), step + 1);
    simulation.step([&](MlpImpl& of, int rank) {
      at::Tensor sum;
      for (int64_t micro = 0; micro < 3; ++micro) {
        const auto loss = mean_loss(of.forward(batch(rank, step, micro))) / 3;
        sum = sum.defined() ? sum + loss : loss;
      }
      return sum;
    });
    expect_equal(model, simulation);
  }
}

TEST(Decentralized, DEC01_a_parameter_that_no_group_has_is_refused_unless_it_is_frozen_or_ignored) {
  const auto recipe = optimizer_recipe<torch::optim::SGD>(torch::optim::SGDOptions(0.1), [](const auto& module) {
    OptimizerRecipe::ParamGroups groups;
    groups.emplace_back(dynamic_cast<const MlpImpl&>(module).first->parameters());
    groups.emplace_back(dynamic_cast<const MlpImpl&>(module).second->parameters());
    return groups;
  });
  const auto wrap = [&](const Mlp& model, Options options) {
    options.topology = ring();
    const DecentralizedDataParallel parallel(model, recipe, group(), options);
  };
  const auto model = seeded(1);
  const auto text = refusal([&] { wrap(model, {}); });
  EXPECT_NE(text.find("no param group has third.weight, third.bias, so that nothing would train it"), std::string::npos)
      << text;
  EXPECT_NO_THROW(wrap(model, {.ignored = {"third.weight", "third.bias"}}));
  for (auto& parameter : model->third->parameters()) parameter.set_requires_grad(false);
  EXPECT_NO_THROW(wrap(model, {}));
}

TEST(Decentralized, DEC01_a_backward_whose_wrapper_is_gone_is_refused) {
  const auto loss =
      mean_loss(DecentralizedDataParallel(seeded(1), plain(), group(), {.topology = ring()}).forward(batch(me(), 0)));
  const auto text = refusal([&] { loss.backward(); });
  EXPECT_NE(text.find("wrapper is gone by now"), std::string::npos) << text;
}

TEST(Decentralized, DEC01_what_reads_a_used_gradient_is_told_what_to_call) {
  auto simulation = simulated();
  auto model = seeded(1);
  const auto train = [&](auto& parallel, int64_t step) {
    mean_loss(parallel.forward(batch(me(), step))).backward();
    simulation.step([&](MlpImpl& of, int rank) { return mean_loss(of.forward(batch(rank, step))); });
    expect_equal(model, simulation);
  };
  {
    DecentralizedDataParallel parallel(model, plain(), group(), {.topology = ring(), .bucket_cap_mb = small_bucket});
    at::Tensor stand_in;
    for (int64_t step = 0; step < 6; ++step) {
      train(parallel, step);
      const auto& weight = model->first->weight;
      EXPECT_TRUE(step == 0 || weight.grad().is_same(stand_in)) << "no memory is added";
      stand_in = weight.grad();
      for (const auto& act : std::vector<std::function<void()>>{
               [&] { torch::nn::utils::clip_grad_norm_(model->parameters(), 1); }, [&] { weight.grad().clone(); },
               [&] { torch::optim::SGD(model->parameters(), 0.1).step(); }}) {
        const auto text = test::refusal(act);
        EXPECT_NE(text.find("which DecentralizedDataParallel has used"), std::string::npos) << text;
        EXPECT_NE(text.find("clip_grad"), std::string::npos) << text;
      }
      if (step % 3 > 0) model->zero_grad(step % 3 == 1);
    }
    train(parallel, 6);
    model->second->zero_grad();
    const auto text = test::refusal([&] { mean_loss(parallel.forward(batch(me(), 7))).backward(); });
    EXPECT_NE(text.find("the gradient of parameter second."), std::string::npos) << text;
    parallel.forward(batch(me(), 7));
    train(parallel, 7);
  }
  EXPECT_FALSE(model->first->weight.grad().defined());
}

TEST(Decentralized, DEC08_what_autograd_grad_computes_is_no_step) {
  auto simulation = simulated();
  auto model = seeded(1);
  DecentralizedDataParallel parallel(model, plain(), group(), {.topology = ring(), .bucket_cap_mb = small_bucket});
  // Wasserstein critics: the loss has the norm of the gradient at the inputs.
  const auto penalised = [](const at::Tensor& x, const auto& forward) {
    const auto input = x.detach().requires_grad_();
    const at::Tensor output = forward(input);
    const auto gradient = torch::autograd::grad({output.sum()}, {input}, {}, /*retain=*/true, /*create=*/true)[0];
    return output.mean() + (gradient.norm(2, 1) - 1).pow(2).mean();
  };
  for (int64_t step = 0; step < 5; ++step) {
    const auto x = batch(me(), step);
    torch::autograd::grad({mean_loss(parallel.forward(x))}, model->parameters());
    EXPECT_EQ(parallel.steps(), step) << "a gradient that is looked at";
    penalised(x, [&](const at::Tensor& input) { return parallel.forward(input); }).backward();
    EXPECT_EQ(parallel.steps(), step + 1);
    simulation.step([&](MlpImpl& of, int rank) {
      return penalised(batch(rank, step), [&](const at::Tensor& input) { return of.forward(input); });
    });
    expect_equal(model, simulation);
  }
}

// Tensors that forward leaves in a member are the module's own business.
struct SilentImpl : torch::nn::Module {
  SilentImpl() { inner = register_module("inner", Mlp()); }
  void forward(const at::Tensor& x) { loss = mean_loss(inner(x)); }
  Mlp inner{nullptr};
  at::Tensor loss;
};

TEST(Decentralized, DEC01_a_forward_may_return_nothing) {
  torch::manual_seed(1);
  auto model = std::make_shared<SilentImpl>();
  auto simulation = simulated();
  DecentralizedDataParallel<SilentImpl> parallel(model, plain(), group(), {.topology = ring()});
  for (int64_t step = 0; step < 3; ++step) {
    parallel.forward(batch(me(), step));
    model->loss.backward();
    simulation.step(loss_of(step));
    expect_equal(model->inner, simulation);
  }
}

TEST(Decentralized, DEC09_clips_to_the_exact_norm_of_all_buckets_or_of_each) {
  for (const auto scope : {ClipScope::all_gradients, ClipScope::bucket}) {
    auto simulation = simulated();
    auto model = seeded(1);
    DecentralizedDataParallel parallel(
        model, plain(), group(), {.topology = ring(), .clip_grad = 0.01, .clip = scope, .bucket_cap_mb = small_bucket});
    double norm = 0;
    for (int64_t step = 0; step < 5; ++step) {
      mean_loss(parallel.forward(batch(me(), step))).backward();
      const auto buckets = parallel.buckets();
      for (int rank = 0; rank < group().size(); ++rank) {
        auto& of = simulation.model(rank);
        loss_of(step)(of, rank).backward();
        std::vector<std::vector<std::string>> parts = buckets;
        if (scope == ClipScope::all_gradients) {
          parts = {{}};
          for (const auto& bucket : buckets) parts[0].insert(parts[0].end(), bucket.begin(), bucket.end());
        }
        for (const auto& part : parts) {
          double square = 0;
          for (const auto& name : part) {
            square += of.named_parameters()[name].grad().pow(2).sum().item<double>();
          }
          if (rank == me()) norm = std::sqrt(square);
          const double factor = std::min(1.0, 0.01 / std::sqrt(square));
          for (const auto& name : part) of.named_parameters()[name].mutable_grad() *= factor;
        }
      }
      simulation.finish_step();
      expect_equal(model, simulation, 1e-5);  // torch adds 1e-6 to the norm
      if (scope == ClipScope::all_gradients) {
        EXPECT_NEAR(parallel.last_norm(), norm, 1e-5 * norm);
      }
    }
  }
}

// The other ranks hear of it with the values that they mix, and then have the scale that they would have had at once.
TEST(Decentralized, DEC09_scales_of_all_ranks_come_to_be_the_same) {
  const GradScalerOptions scaling{.initial_scale = 1024, .growth_interval = 4, .hysteresis = 1};
  for (const auto* name : {"ring", "complete", "one-peer-exp"}) {
    auto model = seeded(1);
    DecentralizedDataParallel parallel(model, plain(), group(),
                                       {.topology = make_topology(name, group().size()), .scaler = scaling});
    GradScaler common(scaling);
    for (int64_t step = 0; step < 40; ++step) {
      const auto failing = [&](int rank) {
        return (step == 3 && rank == 0) || (step >= 9 && step < 12 && rank == step % 2);
      };
      bool anywhere = false;
      for (int rank = 0; rank < group().size(); ++rank) anywhere = anywhere || failing(rank);
      const double poison = failing(me()) ? INFINITY : 1;
      parallel.scale_loss(mean_loss(parallel.forward(batch(me(), step))) * poison).backward();
      common.update(anywhere);
      if (step >= 24) {
        EXPECT_EQ(parallel.scaler()->value(), common.value()) << name << " step " << step;
      }
    }
  }
}

TEST(Decentralized, DEC09_inf_on_one_rank_skips_its_update_and_not_its_mixing) {
  auto simulation = simulated();
  auto model = seeded(1);
  DecentralizedDataParallel parallel(model, plain(), group(),
                                     {.topology = ring(),
                                      .scaler = GradScalerOptions{.initial_scale = 1024, .hysteresis = 1},
                                      .bucket_cap_mb = small_bucket});
  for (int64_t step = 0; step < 4; ++step) {
    const double poison = step == 2 && me() == 0 ? INFINITY : 1;
    parallel.scale_loss(mean_loss(parallel.forward(batch(me(), step))) * poison).backward();
    simulation.step(
        [&](MlpImpl& of, int rank) { return step == 2 && rank == 0 ? at::Tensor() : loss_of(step)(of, rank); });
    expect_equal(model, simulation);
    if (step < 3) {  // later the others hear of it
      EXPECT_EQ(parallel.scaler()->value(), step == 2 && me() == 0 ? 512 : 1024);
    }
  }
}

struct ConvImpl : torch::nn::Module {
  ConvImpl() {
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, 3)));
    head = register_module("head", torch::nn::Linear(16, 2));
    to(at::kDouble);
    conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
  }
  at::Tensor forward(const at::Tensor& x) { return head(torch::tanh(conv(x)).flatten(1)); }
  torch::nn::Conv2d conv{nullptr};
  torch::nn::Linear head{nullptr};
};

at::Tensor images(int rank, int64_t step) {
  return batch(rank, step, 0, 2, 48).view({2, 3, 4, 4});
}

TEST(Decentralized, DEC13_channels_last_parameters_keep_their_format_in_both_layouts) {
  const auto make = [] {
    torch::manual_seed(3);
    return std::make_shared<ConvImpl>();
  };
  for (const bool views : {true, false}) {
    Simulation<ConvImpl> simulation(ring(), make, momentum_sgd);
    const auto model = make();
    DecentralizedDataParallel<ConvImpl> parallel(model, plain(), group(),
                                                 {.topology = ring(), .param_as_bucket_view = views});
    for (int64_t step = 0; step < 5; ++step) {
      mean_loss(parallel.forward(images(me(), step))).backward();
      simulation.step([&](ConvImpl& of, int rank) { return mean_loss(of.forward(images(rank, step))); });
    }
    EXPECT_LT(difference(model->parameters(), simulation.model(me()).parameters()), 1e-11);
    EXPECT_TRUE(model->conv->weight.is_contiguous(at::MemoryFormat::ChannelsLast));
  }
}

struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    embedding = register_module("embedding", torch::nn::Embedding(11, 6));
    spare = register_module("spare", torch::nn::Linear(6, 6));
    to(at::kDouble);
  }
  at::Tensor forward(int64_t first, bool with_spare) {
    auto x = embedding(at::arange(first, first + 4) % 11);
    if (with_spare) x = x + spare(x);
    return torch::nn::functional::linear(torch::tanh(x), embedding->weight);
  }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::Linear spare{nullptr};
};

// DEC14 and BEY02: a tied parameter is used twice; rank 0 uses `spare` in every second step, but not in the first.
TEST(Decentralized, DEC14_tied_unused_and_rank_dependent_parameters_are_updated_once_or_only_mixed) {
  const auto make = [] {
    torch::manual_seed(4);
    return std::make_shared<TiedImpl>();
  };
  Simulation<TiedImpl> simulation(ring(), make, momentum_sgd);
  const auto model = make();
  DecentralizedDataParallel<TiedImpl> parallel(model, plain(), group(), {.topology = ring(), .bucket_cap_mb = 0.0001});
  const auto spare = [](int rank, int64_t step) { return rank == 0 && step % 2 == 1; };
  for (int64_t step = 0; step < 8; ++step) {
    mean_loss(parallel.forward(me() + step, spare(me(), step))).backward();
    simulation.step([&](TiedImpl& of, int rank) { return mean_loss(of.forward(rank + step, spare(rank, step))); });
    ASSERT_LT(difference(model->parameters(), simulation.model(me()).parameters()), 1e-11) << step;
  }
  EXPECT_GT(parallel.buckets().size(), 1);
}

TEST(Decentralized, BEY10_after_an_exception_neighbours_have_their_values_and_training_goes_on) {
  auto simulation = simulated();
  auto model = seeded(1);
  DecentralizedDataParallel parallel(model, plain(), group(), {.topology = ring(), .bucket_cap_mb = small_bucket});
  bool armed = false;
  model->first->weight.register_hook([&](const at::Tensor&) {
    if (armed) throw std::runtime_error("a fault in backward");
  });
  for (int64_t step = 0; step < 8; ++step) {
    const bool in_forward = step == 2 && me() == 0;
    if (in_forward) {
      EXPECT_ANY_THROW(parallel.forward(at::zeros({4, 7}, at::kDouble)));
    }
    armed = step == 4 && me() == 0;
    const auto loss = mean_loss(parallel.forward(batch(me(), step)));
    if (armed) {
      EXPECT_ANY_THROW(loss.backward());
      armed = false;
      parallel.abandon_step();  // the next forward would do it too
    } else {
      loss.backward();
    }
    for (int rank = 0; rank < group().size(); ++rank) loss_of(step)(simulation.model(rank), rank).backward();
    if (step == 4) {
      // Buckets that were complete had been updated; the incomplete one is only mixed.
      for (const auto& bucket : parallel.buckets()) {
        if (std::find(bucket.begin(), bucket.end(), "first.weight") == bucket.end()) continue;
        for (const auto& name : bucket) simulation.model(0).named_parameters()[name].mutable_grad().reset();
      }
    }
    simulation.finish_step();
    expect_equal(model, simulation);
    EXPECT_EQ(parallel.steps(), step + 1);
  }
}

TEST(Decentralized, bad_input_is_one_error_on_every_rank) {
  auto model = seeded(1);
  const auto refused = [&](const Options& options, const std::string& text) {
    try {
      DecentralizedDataParallel parallel(model, plain(), group(), options);
      ADD_FAILURE() << "accepted: " << text;
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  refused({.topology = make_topology("ring", group().size() + 1)}, "make_topology(name, group.size())");
  refused({.topology = ring(), .clip_grad = -1}, "clip_grad is -1");
  refused({.topology = ring(), .exchange_dtype = at::kInt}, "exchange_dtype Int");
  refused({.topology = ring(), .clip = ClipScope::bucket, .scaler = GradScalerOptions{}}, "ClipScope::all_gradients");
  refused({.topology = ring(), .neighbour_timeout_seconds = 0, .bucket_cap_mb = 0}, "neighbour_timeout_seconds is 0");
  EXPECT_THROW(DecentralizedDataParallel(model, OptimizerRecipe(), group(), {.topology = ring()}), UsageError);
  if (group().size() > 1) {
    EXPECT_THROW(DecentralizedDataParallel(model, plain(), group(), {.topology = ring(), .bucket_cap_mb = 1.0 + me()}),
                 DisagreeError);
    EXPECT_THROW(DecentralizedDataParallel(
                     model, plain(), group(),
                     {.topology = ring(), .scaler = me() == 0 ? std::optional(GradScalerOptions{}) : std::nullopt}),
                 DisagreeError);
    const auto other = make_topology(me() == 0 ? "ring" : "star", group().size());
    if (group().size() > 2) {
      EXPECT_THROW(DecentralizedDataParallel(model, plain(), group(), {.topology = other}), DisagreeError);
    }
  }
  DecentralizedDataParallel parallel(model, plain(), group(), {.topology = ring()});
  model->second->bias.requires_grad_(false);
  mean_loss(parallel.forward(batch(me(), 0))).backward();  // frozen later: it is only mixed
  parallel.leave();
  EXPECT_THROW(mean_loss(parallel.forward(batch(me(), 0))).backward(), UsageError);
  EXPECT_THROW(parallel.backward(mean_loss(parallel.forward(batch(me(), 0))), 1), UsageError);
  EXPECT_THROW(parallel.step_without_update(), UsageError);
  EXPECT_THROW(parallel.global_avg(), UsageError);
  EXPECT_THROW(parallel.consensus_distance(), UsageError);
  EXPECT_THROW(parallel.remaining(), UsageError);
  EXPECT_THROW(TrainingState state(parallel); save("nowhere", state), UsageError);
}

}  // namespace
}  // namespace shoal::decentralized_rules_test
