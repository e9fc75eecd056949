// Exchanges of decentralised ranks: averages, hooks, push-sum, rounding, state, schedules.

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>

#include <set>
#include <string>

#include "shoal/checkpoint.h"
#include "shoal/error.h"
#include "tests/strategy/checkpoint/checkpoint_training.h"
#include "tests/strategy/decentralized/decentralized_ring.h"
#include "tests/support/refusal.h"

namespace shoal::decentralized_exchange_test {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace): helpers of this folder's tests
using Options = DecentralizedDataParallelOptions;

TEST(Decentralized, DEC12_ranks_start_from_rank_0s_values) {
  auto model = seeded(1 + me());
  DecentralizedDataParallel parallel(model, plain(), group(), {.topology = ring()});
  EXPECT_EQ(difference(model->parameters(), seeded(1)->parameters()), 0);
}

// Module with a batch norm, whose statistics are buffers, and a counter.
struct NormedImpl : torch::nn::Module {
  NormedImpl() {
    linear = register_module("linear", torch::nn::Linear(12, 6));
    norm = register_module("norm", torch::nn::BatchNorm1d(6));
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) { return norm(linear(x)); }
  torch::nn::Linear linear{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};

TEST(Decentralized, DEC12_buffers_start_from_rank_0s_too) {
  torch::manual_seed(1 + me());
  auto model = std::make_shared<NormedImpl>();
  model->norm->running_mean.fill_(me() + 3);
  model->norm->num_batches_tracked.fill_(me() + 7);
  const auto own = model->norm->running_var.clone().fill_(me() + 1);
  model->norm->running_var.copy_(own);
  DecentralizedDataParallel<NormedImpl> parallel(model, plain(), group(),
                                                 {.topology = ring(), .ignored = {"norm.running_var"}});
  torch::manual_seed(1);
  EXPECT_EQ(difference(model->parameters(), NormedImpl().parameters()), 0);
  EXPECT_TRUE(at::equal(model->norm->running_mean, at::full({6}, 3.0, at::kDouble)));
  EXPECT_EQ(model->norm->num_batches_tracked.item<int64_t>(), 7);
  EXPECT_TRUE(at::equal(model->norm->running_var, own)) << "ignored";
}

TEST(Decentralized, DEC11_global_avg_averages_floating_point_buffers_if_asked) {
  for (const bool wanted : {true, false}) {
    torch::manual_seed(1);
    auto model = std::make_shared<NormedImpl>();
    DecentralizedDataParallel<NormedImpl> parallel(
        model, plain(), group(), {.topology = ring(), .average_buffers = wanted, .param_as_bucket_view = wanted});
    for (int64_t round = 0; round < 3; ++round) {
      for (int64_t step = 2 * round; step < 2 * round + 2; ++step) {
        mean_loss(parallel.forward(batch(me(), step))).backward();
      }
      auto expected = model->norm->running_mean.clone();
      if (wanted) group().all_reduce(expected, ReduceOp::avg).wait();
      parallel.global_avg();
      EXPECT_LT(difference({model->norm->running_mean}, {expected}), 1e-12) << wanted << round;
      EXPECT_EQ(model->norm->num_batches_tracked.item<int64_t>(), 2 * round + 2);
      EXPECT_LT(parallel.consensus_distance(), 1e-14);
    }
    parallel.global_avg();  // at once again
    EXPECT_EQ(parallel.steps(), 6);
  }
}

TEST(Decentralized, DEC11_global_avg_averages_before_the_first_step) {
  for (const auto* name : {"ring", "complete"}) {
    auto model = seeded(1);
    DecentralizedDataParallel parallel(
        model, plain(), group(), {.topology = make_topology(name, group().size()), .bucket_cap_mb = small_bucket});
    std::vector<at::Tensor> mean;
    {
      const torch::NoGradGuard no_grad;
      for (auto parameter : model->parameters()) {
        parameter.add_(me());
        mean.push_back(parameter.detach().clone().contiguous());
        group().all_reduce(mean.back(), ReduceOp::avg).wait();
      }
    }
    if (group().size() > 1) {
      EXPECT_GT(parallel.consensus_distance(), 1);
    }
    parallel.global_avg();
    EXPECT_LT(difference(model->parameters(), mean), 1e-12);
    EXPECT_LT(parallel.consensus_distance(), 1e-12);
    mean_loss(parallel.forward(batch(me(), 0))).backward();
    parallel.global_avg();
    EXPECT_LT(parallel.consensus_distance(), 1e-12);
  }
}

// Branches whose gradients arrive in another order on every other rank, and again in another one in later steps.
struct CrossedImpl : torch::nn::Module {
  CrossedImpl() {
    torch::manual_seed(6);
    left = register_module("left", torch::nn::Linear(12, 12));
    right = register_module("right", torch::nn::Linear(12, 12));
    last = register_module("last", torch::nn::Linear(12, 3));
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x, bool crossed) {
    return last(crossed ? torch::tanh(left(torch::tanh(right(x)))) : torch::tanh(right(torch::tanh(left(x)))));
  }
  torch::nn::Linear left{nullptr}, right{nullptr}, last{nullptr};
};

TEST(Decentralized, DEC02_buckets_follow_rank_0s_order_and_others_may_differ) {
  const auto make = [] { return std::make_shared<CrossedImpl>(); };
  for (const bool first_crossed : {false, true}) {
    for (const bool views : {true, false}) {
      Simulation<CrossedImpl> simulation(ring(), make, momentum_sgd);
      const auto model = make();
      DecentralizedDataParallel<CrossedImpl> parallel(
          model, plain(), group(), {.topology = ring(), .bucket_cap_mb = small_bucket, .param_as_bucket_view = views});
      const auto crossed = [&](int rank, int64_t step) { return ((rank + step) % 2 == 1) != first_crossed; };
      for (int64_t step = 0; step < 6; ++step) {
        mean_loss(parallel.forward(batch(me(), step), crossed(me(), step))).backward();
        simulation.step(
            [&](CrossedImpl& of, int rank) { return mean_loss(of.forward(batch(rank, step), crossed(rank, step))); });
        ASSERT_LT(difference(model->parameters(), simulation.model(me()).parameters()), 1e-11) << step;
      }
      const auto buckets = parallel.buckets();
      ASSERT_GT(buckets.size(), 1U);
      // In the order of rank 0's first backward.
      std::vector<std::string> order;
      for (const auto& bucket : buckets) order.insert(order.end(), bucket.begin(), bucket.end());
      const auto place = [&](const char* name) { return std::find(order.begin(), order.end(), name) - order.begin(); };
      EXPECT_EQ(place("left.weight") < place("right.weight"), first_crossed);
    }
  }
}

TEST(Decentralized, DEC11_global_avg_makes_ranks_bit_equal_and_training_goes_on) {
  auto simulation = simulated();
  auto model = seeded(1);
  DecentralizedDataParallel parallel(model, plain(), group(), {.topology = ring(), .bucket_cap_mb = small_bucket});
  parallel.global_avg();  // ranks are equal before the first step
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

// EXTRA (Shi, Ling, Wu and Yin, 2015): x <- W x - rate * g + sum over former steps of (W - I) x / 2. With it, ranks
// with different losses converge to the minimum of the mean loss; without it, at a constant rate, only near it.
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
        model, optimizer_recipe<torch::optim::SGD>(torch::optim::SGDOptions(0.05)), group(), options);
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
  // Rank 0 sends to all, the others to rank 0 only: neither weights nor values are balanced.
  std::vector<Edge> edges;
  for (int rank = 1; rank < group().size(); ++rank) {
    edges.push_back({0, rank, 1.0 / group().size()});
    edges.push_back({rank, 0, 0.25});
  }
  const Topology topology("hub", group().size(), Stochastic::column, {RoundSpec{.edges = edges}});
  auto model = seeded(1);
  DecentralizedDataParallel parallel(model, optimizer_recipe<torch::optim::SGD>(torch::optim::SGDOptions(0)), group(),
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
    DecentralizedDataParallel parallel(model, optimizer_recipe<torch::optim::SGD>(torch::optim::SGDOptions(0)), group(),
                                       {.topology = make_topology(name, group().size())});
    for (int64_t step = 0; step < 200; ++step) {
      mean_loss(parallel.forward(batch(me(), step).to(at::kFloat))).backward();
    }
    EXPECT_LT(difference(model->parameters(), before), 1e-6) << name;
  }
}

TEST(Decentralized, BEY22_neighbours_may_get_rounded_values) {
  // Follows the definition step by step, from the ranks' own values.
  auto model = seeded(1);
  DecentralizedDataParallel parallel(
      model, optimizer_recipe<torch::optim::SGD>(torch::optim::SGDOptions(0.1)), group(),
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

TEST(Decentralized, DEC20_state_has_the_modules_own_names_and_training_goes_on_from_it) {
  const auto adam = optimizer_recipe<torch::optim::Adam>(torch::optim::AdamOptions(1e-2));
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

TEST(Decentralized, DEC20_training_that_stopped_goes_on_with_the_topologys_next_round) {
  const ScheduleFactory halve = [](torch::optim::Optimizer& optimizer) {
    return std::make_unique<torch::optim::StepLR>(optimizer, 2, 0.5);
  };
  const auto momentum = plain();
  const auto train = [&](auto& parallel, int64_t begin, int64_t end) {
    for (auto step = begin; step < end; ++step) {
      parallel.scale_loss(mean_loss(parallel.forward(batch(me(), step)))).backward();
    }
  };
  const SharedFolder folder;
  for (const int64_t stop : {0, 1, 5}) {
    const Options options{.topology = make_topology("one-peer-exp", group().size()),
                          .schedule = halve,
                          .scaler = GradScalerOptions{.initial_scale = 8, .growth_interval = 3},
                          .bucket_cap_mb = small_bucket};
    auto model = seeded(1);
    DecentralizedDataParallel parallel(model, momentum, group(), options);
    train(parallel, 0, stop);
    TrainingState before(parallel);
    save(folder / std::to_string(stop), before, {.step = stop});
    auto second = seeded(9);
    DecentralizedDataParallel later(second, momentum, group(), options);
    TrainingState after(later);
    load(folder / std::to_string(stop), after);
    EXPECT_EQ(later.steps(), stop);
    train(parallel, stop, stop + 5);
    train(later, stop, stop + 5);
    EXPECT_LT(difference(second->parameters(), model->parameters()), 1e-12) << stop;
    EXPECT_EQ(later.steps(), stop + 5);
    EXPECT_EQ(later.scaler()->value(), parallel.scaler()->value());
    EXPECT_EQ(later.optimizers()[0]->param_groups()[0].options().get_lr(),
              parallel.optimizers()[0]->param_groups()[0].options().get_lr());
    EXPECT_NE(refusal([&] { load(folder / std::to_string(stop), after); }).find("load before the first step"),
              std::string::npos);
  }
}

TEST(Decentralized, DEC01_a_schedule_per_optimizer_and_decay_by_name) {
  std::set<std::string> decayed;
  const auto recipe =
      optimizer_recipe<torch::optim::SGD>(torch::optim::SGDOptions(0.1), [&](const torch::nn::Module& module) {
        std::vector<at::Tensor> weights, others;
        for (const auto& entry : module.named_parameters()) {
          const bool weight = entry.key().ends_with("weight");
          (weight ? weights : others).push_back(entry.value());
          if (weight) decayed.insert(entry.key());
        }
        std::vector<torch::optim::OptimizerParamGroup> groups;
        groups.emplace_back(
            weights, std::make_unique<torch::optim::SGDOptions>(torch::optim::SGDOptions(0.1).weight_decay(0.1)));
        groups.emplace_back(others);
        return groups;
      });
  auto model = seeded(1);
  DecentralizedDataParallel parallel(
      model, recipe, group(),
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

}  // namespace
}  // namespace shoal::decentralized_exchange_test
