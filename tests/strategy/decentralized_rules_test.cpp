// DecentralizedDataParallel beyond the plain loop: accumulation, layouts, clipping, scaling, averaging, hooks, state.

#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>

#include "shoal/base/error.h"
#include "shoal/strategy/decentralized.h"
#include "tests/strategy/decentralized_simulation.h"
#include "tests/support/models.h"
#include "tests/support/world.h"

namespace shoal {
namespace {

using test::batch;
using test::difference;
using test::mean_loss;
using test::Mlp;
using test::MlpImpl;
using test::seeded;
using test::world;
using Options = DecentralizedDataParallelOptions;
using Simulation = test::Simulation<MlpImpl>;

const torch::optim::SGDOptions sgd = torch::optim::SGDOptions(0.1).momentum(0.9);
constexpr double small_bucket = 0.001;  // MiB; several buckets

const Group& group() {
  return world().group();
}
int me() {
  return group().rank();
}
Topology ring() {
  return make_topology("ring", group().size());
}
OptimizerOfNamed plain() {
  return optimizer_with<torch::optim::SGD>(sgd);
}
Simulation simulated() {
  return {ring(), [] { return seeded(1).ptr(); }, sgd};
}
auto loss_of(int64_t step) {
  return [step](MlpImpl& model, int rank) { return mean_loss(model.forward(batch(rank, step))); };
}
void expect_equal(const Mlp& model, Simulation& simulation, double tolerance = 1e-11) {
  EXPECT_LT(difference(model->parameters(), simulation.model(me()).parameters()), tolerance);
}

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
    EXPECT_EQ(parallel.step(), step + 1);
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

TEST(Decentralized, BEY04_weights_make_the_mean_over_uneven_micro_batches_exact) {
  auto simulation = simulated();
  auto model = seeded(1);
  DecentralizedDataParallel parallel(model, plain(), group(), {.topology = ring(), .bucket_cap_mb = small_bucket});
  for (int64_t step = 0; step < 4; ++step) {
    const std::vector<int64_t> samples{5, 1 + me()};
    for (int64_t micro = 0; micro < 2; ++micro) {
      const auto scope = parallel.no_sync(micro == 0);
      const auto output = parallel.forward(batch(me(), step, micro, samples[micro]));
      parallel.backward(output.pow(2).sum(), static_cast<double>(samples[micro]));
    }
    simulation.step([&](MlpImpl& of, int rank) {
      return (of.forward(batch(rank, step, 0, 5)).pow(2).sum() +
              of.forward(batch(rank, step, 1, 1 + rank)).pow(2).sum()) /
             (6 + rank);
    });
    expect_equal(model, simulation);
  }
  // A rank without samples mixes all the same.
  if (me() == 0) {
    parallel.backward({}, 0);
  } else {
    parallel.backward(parallel.forward(batch(me(), 9)).pow(2).sum(), 4);
  }
  simulation.step(
      [&](MlpImpl& of, int rank) { return rank == 0 ? at::Tensor() : of.forward(batch(rank, 9)).pow(2).sum() / 4; });
  expect_equal(model, simulation);
  EXPECT_THROW(parallel.backward({}, 1), UsageError);
  EXPECT_THROW(parallel.backward({}, -1), UsageError);
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
    EXPECT_EQ(parallel.scaler()->value(), step >= 2 && me() == 0 ? 512 : 1024);
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
    test::Simulation<ConvImpl> simulation(ring(), make, sgd);
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

// DEC14 and BEY02: a tied parameter is used twice; `spare` by rank 0 in every second step, never in the first.
TEST(Decentralized, DEC14_tied_unused_and_rank_dependent_parameters_are_updated_once_or_only_mixed) {
  const auto make = [] {
    torch::manual_seed(4);
    return std::make_shared<TiedImpl>();
  };
  test::Simulation<TiedImpl> simulation(ring(), make, sgd);
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

TEST(Decentralized, DEC12_ranks_start_from_rank_0s_values) {
  auto model = seeded(1 + me());
  DecentralizedDataParallel parallel(model, plain(), group(), {.topology = ring()});
  EXPECT_EQ(difference(model->parameters(), seeded(1)->parameters()), 0);
}

TEST(Decentralized, DEC11_global_avg_makes_ranks_bit_equal_and_training_goes_on) {
  auto simulation = simulated();
  auto model = seeded(1);
  DecentralizedDataParallel parallel(model, plain(), group(), {.topology = ring(), .bucket_cap_mb = small_bucket});
  parallel.global_avg();  // before the first step: nothing to do
  for (int64_t step = 0; step < 9; ++step) {
    mean_loss(parallel.forward(batch(me(), step))).backward();
    simulation.step(loss_of(step));
    EXPECT_NEAR(parallel.consensus_distance(), simulation.consensus_distance(), 1e-12) << "DEC18";
    if (step % 4 != 3) continue;
    parallel.global_avg();
    simulation.average();
    expect_equal(model, simulation);
    std::vector<at::Tensor> rank_0;
    for (const auto& parameter : model->parameters()) rank_0.push_back(parameter.detach().clone());
    for (auto& tensor : rank_0) group().broadcast(tensor, 0).wait();
    for (size_t i = 0; i < rank_0.size(); ++i) EXPECT_TRUE(at::equal(rank_0[i], model->parameters()[i]));
    EXPECT_LT(parallel.consensus_distance(), 1e-14);
  }
  expect_equal(model, simulation);
}

// EXTRA (Shi, Ling, Wu and Yin, 2015): x <- W x - rate * g + sum over former steps of (W - I) x / 2. With it ranks
// whose losses differ meet in the minimum of the mean loss; without, at a constant rate, beside it.
TEST(Decentralized, DEC10_a_hook_on_what_is_received_makes_gradient_tracking) {
  struct PointImpl : torch::nn::Module {
    PointImpl() { point = register_parameter("point", at::zeros({3}, at::kDouble)); }
    at::Tensor forward(const at::Tensor& target, double curvature) {
      return (curvature * (point - target).pow(2)).sum();
    }
    at::Tensor point;
  };
  const auto ranks = group().size();
  const auto target = [](int rank) { return at::arange(3, at::kDouble) * (rank + 1) - rank * rank; };
  const auto curvature = [](int rank) { return 1.0 + rank; };
  auto minimum = at::zeros({3}, at::kDouble);
  double total = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    minimum += curvature(rank) * target(rank);
    total += curvature(rank);
  }
  minimum /= total;
  const auto error_with = [&](bool tracking) {
    at::Tensor correction = at::zeros({3}, at::kDouble);
    const auto hook = [&](const PreAverage& about) {
      const at::Tensor x = about.parameters[0].parameter;
      const auto change = (about.own_weight - 1) * x + about.received[0];  // (W - I) x
      at::Tensor(about.received[0]).add_(correction);
      correction += change / 2;
    };
    auto model = std::make_shared<PointImpl>();
    Options options{.topology = make_topology("complete", ranks)};
    if (tracking) options.pre_average_hook = hook;
    // A static, symmetric matrix, lazy so that the method converges.
    std::vector<Edge> edges;
    for (int i = 0; i < ranks; ++i) {
      for (int j = 0; j < ranks; ++j) {
        if (i != j) edges.push_back({i, j, 0.5 / ranks});
      }
    }
    if (ranks > 1) options.topology = Topology("lazy", ranks, Stochastic::doubly, {RoundSpec{.edges = edges}});
    DecentralizedDataParallel<PointImpl> parallel(
        model, optimizer_with<torch::optim::SGD>(torch::optim::SGDOptions(0.05)), group(), options);
    for (int step = 0; step < 400; ++step) parallel.forward(target(me()), curvature(me())).backward();
    return (model->point - minimum).norm().item<double>();
  };
  EXPECT_LT(error_with(true), 1e-9);
  if (ranks > 1) {
    EXPECT_GT(error_with(false), 1e-3);
  }
}

TEST(Decentralized, BEY04_push_sum_reaches_the_exact_mean_over_a_directed_graph) {
  if (group().size() < 3) GTEST_SKIP() << "two ranks have no directed graph that is not doubly stochastic";
  // Rank 0 sends to all, the others to rank 0 alone: neither weights nor values are balanced.
  std::vector<Edge> edges;
  for (int rank = 1; rank < group().size(); ++rank) {
    edges.push_back({0, rank, 1.0 / group().size()});
    edges.push_back({rank, 0, 0.25});
  }
  const Topology topology("hub", group().size(), Stochastic::column, {RoundSpec{.edges = edges}});
  auto model = seeded(1);
  DecentralizedDataParallel parallel(model, optimizer_with<torch::optim::SGD>(torch::optim::SGDOptions(0)), group(),
                                     {.topology = topology, .bucket_cap_mb = small_bucket});
  std::vector<at::Tensor> mean;
  {
    const torch::NoGradGuard no_grad;
    for (const auto& parameter : model->parameters()) {
      at::Tensor(parameter).add_(me() * me());
      mean.push_back(parameter.detach().clone());
      group().all_reduce(mean.back(), ReduceOp::avg).wait();
    }
  }
  for (int64_t step = 0; step < 120; ++step) mean_loss(parallel.forward(batch(me(), step))).backward();
  EXPECT_LT(difference(model->parameters(), mean), 1e-6);
}

TEST(Decentralized, DEC06_ranks_that_agree_stay_where_they_are_in_float32) {
  for (const auto& name : {"complete", "exp", "torus", "star"}) {
    torch::manual_seed(1);
    Mlp model(12, 16, 5, at::kFloat);
    std::vector<at::Tensor> before;
    for (const auto& parameter : model->parameters()) before.push_back(parameter.detach().clone());
    DecentralizedDataParallel parallel(model, optimizer_with<torch::optim::SGD>(torch::optim::SGDOptions(0)), group(),
                                       {.topology = make_topology(name, group().size())});
    for (int64_t step = 0; step < 200; ++step) {
      mean_loss(parallel.forward(batch(me(), step).to(at::kFloat))).backward();
    }
    EXPECT_LT(difference(model->parameters(), before), 1e-6) << name;
  }
}

TEST(Decentralized, BEY22_neighbours_may_get_rounded_values) {
  // One step of the definition at a time, from the ranks' own values.
  auto model = seeded(1);
  DecentralizedDataParallel parallel(
      model, optimizer_with<torch::optim::SGD>(torch::optim::SGDOptions(0.1)), group(),
      {.topology = ring(), .bucket_cap_mb = small_bucket, .exchange_dtype = at::kBFloat16});
  for (int64_t step = 0; step < 6; ++step) {
    std::vector<at::Tensor> expected;
    auto copy = seeded(1);
    {
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < model->parameters().size(); ++i) copy->parameters()[i].copy_(model->parameters()[i]);
    }
    mean_loss(copy->forward(batch(me(), step))).backward();
    for (const auto& parameter : copy->parameters()) {
      const auto own = parameter.detach().contiguous();
      auto all = at::empty({group().size() * own.numel()}, own.options());
      group().all_gather(all, own.flatten()).wait();
      const auto topology = ring();
      auto mixed = step == 0 ? own.clone() : own * topology.round(step).self(me());
      if (step > 0) {
        for (const auto& [source, weight] : topology.round(step).sources(me())) {
          const auto theirs = all.narrow(0, source * own.numel(), own.numel()).view_as(own);
          mixed += weight * theirs.to(at::kBFloat16).to(at::kDouble);
        }
      }
      expected.push_back(mixed - 0.1 * parameter.grad());
    }
    mean_loss(parallel.forward(batch(me(), step))).backward();
    EXPECT_LT(difference(model->parameters(), expected), 1e-12) << step;
  }
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
      parallel.reset();  // the next forward would do it too
    } else {
      loss.backward();
    }
    for (int rank = 0; rank < group().size(); ++rank) loss_of(step)(simulation.model(rank), rank).backward();
    if (step == 4) {
      // Buckets that were complete had been updated; the one that was not is only mixed.
      for (const auto& bucket : parallel.buckets()) {
        if (std::find(bucket.begin(), bucket.end(), "first.weight") == bucket.end()) continue;
        for (const auto& name : bucket) simulation.model(0).named_parameters()[name].mutable_grad().reset();
      }
    }
    simulation.finish_step();
    expect_equal(model, simulation);
    EXPECT_EQ(parallel.step(), step + 1);
  }
}

TEST(Decentralized, DEC20_state_has_the_modules_own_names_and_training_goes_on_from_it) {
  const auto adam = optimizer_with<torch::optim::Adam>(torch::optim::AdamOptions(1e-2));
  const auto train = [&](auto& parallel, int64_t begin, int64_t end) {
    for (auto step = begin; step < end; ++step) mean_loss(parallel.forward(batch(me(), step))).backward();
  };
  auto model = seeded(1);
  DecentralizedDataParallel parallel(model, adam, group(), {.topology = make_topology("complete", group().size())});
  train(parallel, 0, 3);
  const auto state = parallel.state_dict();
  EXPECT_EQ(state.size(), model->parameters().size());
  EXPECT_EQ(state.count("second.weight"), 1);
  parallel.global_avg();

  auto second = seeded(9);
  DecentralizedDataParallel later(
      second, adam, group(), {.topology = make_topology("complete", group().size()), .bucket_cap_mb = small_bucket});
  {
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < model->parameters().size(); ++i) second->parameters()[i].copy_(model->parameters()[i]);
  }
  later.load_state_dict(state);
  train(parallel, 3, 6);
  train(later, 3, 6);
  EXPECT_LT(difference(second->parameters(), model->parameters()), 1e-12);
}

TEST(Decentralized, DEC01_a_schedule_per_optimizer_and_decay_by_name) {
  std::vector<std::string> decayed;
  const OptimizerOfNamed make = [&](const std::vector<NamedParameter>& named) {
    std::vector<at::Tensor> weights, others;
    for (const auto& [name, parameter] : named) {
      const bool weight = name.ends_with("weight");
      (weight ? weights : others).push_back(parameter);
      if (weight) decayed.push_back(name);
    }
    std::vector<torch::optim::OptimizerParamGroup> groups;
    if (!weights.empty()) {
      groups.emplace_back(weights,
                          std::make_unique<torch::optim::SGDOptions>(torch::optim::SGDOptions(0.1).weight_decay(0.1)));
    }
    if (!others.empty()) groups.emplace_back(others);
    return std::make_unique<torch::optim::SGD>(groups, torch::optim::SGDOptions(0.1));
  };
  auto model = seeded(1);
  DecentralizedDataParallel parallel(
      model, make, group(),
      {.topology = ring(),
       .schedule =
           [](torch::optim::Optimizer& optimizer) { return std::make_unique<torch::optim::StepLR>(optimizer, 2, 0.5); },
       .bucket_cap_mb = small_bucket});
  for (int64_t step = 0; step < 4; ++step) mean_loss(parallel.forward(batch(me(), step))).backward();
  EXPECT_EQ(decayed.size(), 3);
  ASSERT_GT(parallel.optimizers().size(), 1);
  auto alone = torch::optim::SGD({at::zeros({1})}, torch::optim::SGDOptions(0.1));
  torch::optim::StepLR schedule(alone, 2, 0.5);
  for (int step = 0; step < 4; ++step) schedule.step();
  for (const auto* optimizer : parallel.optimizers()) {
    EXPECT_EQ(optimizer->param_groups()[0].options().get_lr(), alone.param_groups()[0].options().get_lr());
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
  refused({.topology = ring(), .clip = ClipScope::bucket, .scaler = GradScalerOptions{}}, "clip all_gradients");
  refused({.topology = ring(), .neighbour_timeout_seconds = 0, .bucket_cap_mb = 0}, "neighbour_timeout_seconds is 0");
  EXPECT_THROW(DecentralizedDataParallel(model, OptimizerOfNamed(), group(), {.topology = ring()}), UsageError);
  if (group().size() > 1) {
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
}

}  // namespace
}  // namespace shoal
