// What strategies carry from step to step beside tensors of the model, and wrappers within wrappers.

#include <gmock/gmock.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "checkpoint/loading/reader.h"
#include "shoal/checkpoint.h"
#include "shoal/ddp.h"
#include "shoal/fsdp.h"
#include "shoal/hooks.h"
#include "shoal/local_updates.h"
#include "shoal/optim.h"
#include "shoal/optimizer_in_backward.h"
#include "shoal/zero.h"
#include "tests/support/models.h"
#include "tests/support/shared_folder.h"
#include "tests/support/world.h"

namespace shoal::test::checkpoint_carried_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

void expect_same_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << "tensor " << i;
}

// Every step is clipped by the norm of the one before.
struct Clipped {
  explicit Clipped(int seed) : model(seeded(seed)) {}
  void train(int64_t from, int64_t to) {
    for (int64_t step = from; step < to; ++step) {
      (mean_loss(parallel.forward(batch(group().rank(), step))) * static_cast<double>(1 + step % 3)).backward();
    }
  }
  Mlp model;
  torch::optim::SGD optimizer{model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)};
  DistributedDataParallel<MlpImpl> parallel{model, group(), {.bucket_cap_mb = 1e-4, .first_bucket_mb = 1e-4}};
  OptimizerInBackward inside{parallel, optimizer, {.clip_grad = 0.01, .whole_gradient = WholeGradient::stale}};
  TrainingState state{parallel, optimizer};
};

TEST(TrainingCheckpoint, BEY05_BEY07_clipping_by_the_last_steps_norm_goes_on) {
  const SharedFolder folder;
  Clipped running(3);
  running.train(0, 4);
  const double norm = running.inside.last_norm();
  EXPECT_GT(norm, 0);
  save(folder / "run", running.state, {.step = 4});
  running.train(4, 6);
  for (const bool used : {false, true}) {
    Clipped resumed(5);
    if (used) resumed.train(50, 52);
    EXPECT_TRUE(load(folder / "run", resumed.state).exact);
    EXPECT_EQ(resumed.inside.last_norm(), norm);
    resumed.train(4, 6);
    expect_same_bits(copies(*resumed.model), copies(*running.model));
  }
  load(folder / "run", running.state, {.model_only = true});
  EXPECT_EQ(running.inside.last_norm(), 0) << "training begins anew";
}

struct Hybrid {
  Hybrid(int seed, int shard_size, bool by_parameter)
      : model(seeded(seed)),
        parallel(model, group(),
                 {.sharding_strategy = ShardingStrategy::hybrid_shard,
                  .auto_wrap_policy = wrap_type<torch::nn::LinearImpl>(),
                  .shard_size = shard_size,
                  .shard_by_parameter = by_parameter,
                  .communication_hook = std::make_shared<TopKHook>(TopKOptions{.fraction = 0.1})}) {}
  void train(int64_t from, int64_t to) {
    for (int64_t step = from; step < to; ++step) {
      mean_loss(parallel.forward(batch(group().rank(), step))).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
  }
  Mlp model;
  FullyShardedDataParallel<MlpImpl> parallel;
  FullyShardedOptimizer<FusedAdamW> optimizer{parallel, torch::optim::AdamWOptions(1e-2)};
  TrainingState state{parallel, optimizer};
};

// Residuals are of the shards that the hook has seen.
TEST(TrainingCheckpoint, BEY05_a_hook_across_shards_begins_anew_where_shards_are_others) {
  if (group().size() % 2 != 0) GTEST_SKIP() << "needs shards of two sizes";
  const SharedFolder folder;
  Hybrid running(3, 1, false);
  running.train(0, 3);
  save(folder / "whole", running.state, {.step = 3});
  Hybrid halves(3, 2, false);
  halves.train(0, 3);
  save(folder / "halves", halves.state, {.step = 3});
  const auto loads = [&](const char* name, int shard_size, bool by_parameter, bool exact) {
    SCOPED_TRACE(std::string(name) + " " + std::to_string(shard_size) + (by_parameter ? " by parameter" : ""));
    Hybrid other(5, shard_size, by_parameter);
    const auto loaded = load(folder / name, other.state);
    EXPECT_EQ(loaded.exact, exact);
    if (exact) {
      EXPECT_THAT(loaded.differences, ElementsAre());
    } else {
      EXPECT_THAT(loaded.differences, ElementsAre(HasSubstr("has seen gradients of other shards")));
    }
    other.train(3, 5);
  };
  loads("whole", 1, false, true);
  loads("halves", 2, false, true);
  if (group().size() == 2) return;  // of a whole world's shards there is one
  loads("whole", 2, false, false);
  loads("halves", 1, false, false);
  loads("halves", 2, true, false);
}

using Hook = std::shared_ptr<CommunicationHook>;

Hook top_k(double fraction) {
  return std::make_shared<TopKHook>(TopKOptions{.fraction = fraction});
}

struct HookedDdp {
  HookedDdp(int seed, Hook hook)
      : model(seeded(seed)), parallel(model, group(), {.communication_hook = std::move(hook)}) {}
  Mlp model;
  torch::optim::SGD optimizer{model->parameters(), torch::optim::SGDOptions(0.1)};
  DistributedDataParallel<MlpImpl> parallel;
  TrainingState state{parallel, optimizer};
};

struct HookedZero {
  HookedZero(int seed, Hook hook)
      : model(seeded(seed)), parallel(model, optimizer, group(), {.communication_hook = std::move(hook)}) {}
  Mlp model;
  OSS<torch::optim::SGD> optimizer{model->parameters(), torch::optim::SGDOptions(0.1), group()};
  ShardedDataParallel<MlpImpl> parallel;
  TrainingState state{parallel, optimizer};
};

template <class Hooked>
void expect_difference(const Hook& before, const Hook& now, const std::string& text) {
  const SharedFolder folder;
  Hooked running(3, before);
  mean_loss(running.parallel.forward(batch(group().rank(), 0))).backward();
  running.optimizer.step();
  running.optimizer.zero_grad();
  save(folder / "run", running.state, {.step = 1});
  Hooked other(5, now);
  const auto loaded = load(folder / "run", other.state);
  EXPECT_EQ(loaded.exact, text.empty());
  if (!text.empty()) EXPECT_THAT(loaded.differences, ElementsAre(HasSubstr(text)));
}

TEST(TrainingCheckpoint, BEY05_another_communication_hook_is_a_difference) {
  const std::string was = "the communication hook was 'topk, fraction 0.1, error feedback true', here it is ";
  const auto each = [&]<class Hooked>(Hooked*) {
    expect_difference<Hooked>(top_k(0.1), top_k(0.1), "");
    expect_difference<Hooked>(top_k(0.1), top_k(0.2), was + "'topk, fraction 0.2");
    expect_difference<Hooked>(top_k(0.1), nullptr, was + "'none'");
    expect_difference<Hooked>(nullptr, top_k(0.1), "the communication hook was 'none', here it is 'topk");
  };
  each(static_cast<HookedDdp*>(nullptr));
  each(static_cast<HookedZero*>(nullptr));
}

struct Body : torch::nn::Module {
  Body() {
    torch::manual_seed(8);
    first = register_module("first", torch::nn::Linear(12, 16));
    to(at::kDouble);
  }
  torch::nn::Linear first{nullptr};
};

// What the file lacks differs between ranks then.
TEST(TrainingCheckpoint, BEY05_BEY22_after_a_partial_load_ranks_become_equal_with_the_next_exchange) {
  const SharedFolder folder;
  if (group().rank() == 0) save_module(folder / "body.safetensors", Body());
  group().barrier().wait();
  const auto is_equal = [](const torch::nn::Module& module) {
    double most = 0;
    for (const auto& parameter : module.parameters()) {
      auto high = parameter.detach().clone(), low = parameter.detach().clone();
      group().all_reduce(high, ReduceOp::max).wait();
      group().all_reduce(low, ReduceOp::min).wait();
      most = std::max(most, (high - low).abs().max().item<double>());
    }
    return most == 0;
  };
  const std::vector<LocalUpdatesOptions> all{{.every = 3},
                                             {.every = 3, .outer = OuterNesterov{}},
                                             {.every = 3, .outer = SlowMo{}},
                                             {.every = 3, .outer = OuterNesterov{}, .warmup_steps = 2}};
  for (size_t i = 0; i < all.size(); ++i) {
    SCOPED_TRACE(i);
    auto model = seeded(3);
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
    LocalUpdates updates(model.ptr(), optimizer, group(), all[i]);
    TrainingState state(updates);
    const auto train = [&](int64_t from, int64_t to) {
      for (int64_t step = from; step < to; ++step) {
        mean_loss(model->forward(batch(group().rank(), step))).backward();
        updates.step();
        updates.zero_grad();
      }
    };
    const auto warmup = all[i].warmup_steps;
    train(0, 4 + warmup);
    EXPECT_EQ(is_equal(*model), group().size() == 1);
    auto mean = model->third->weight.detach().clone();
    group().all_reduce(mean, ReduceOp::avg).wait();
    load(folder / "body.safetensors", state, {.partial = true});
    EXPECT_EQ(updates.steps(), 0);
    EXPECT_TRUE(at::equal(model->first->weight, Body().first->weight));
    const auto theta = updates.state_dict().at("third.weight").tensors;
    if (const auto anchor = theta.find("anchor"); anchor != theta.end()) {
      EXPECT_LT(difference({anchor->second}, {mean}), 1e-12);
    }
    train(10, 10 + warmup);
    if (warmup > 0) EXPECT_TRUE(is_equal(*model)) << "in the warm-up";
    train(20, 23);
    EXPECT_TRUE(is_equal(*model)) << "after an exchange";
  }
}

// SlowMo's momentum is one of gradients, OuterNesterov's one of parameters.
TEST(TrainingCheckpoint, BEY05_BEY22_an_outer_optimizer_does_not_take_the_momentum_of_another_one) {
  const std::vector<LocalUpdatesOptions> all{
      {.every = 2}, {.every = 2, .outer = SlowMo{}}, {.every = 2, .outer = OuterNesterov{}}};
  const auto train = [](Mlp& model, LocalUpdates& updates, int64_t from, int64_t to) {
    for (int64_t step = from; step < to; ++step) {
      mean_loss(model->forward(batch(group().rank(), step))).backward();
      updates.step();
      updates.zero_grad();
    }
  };
  for (size_t from = 0; from < all.size(); ++from) {
    const SharedFolder folder;
    auto model = seeded(3);
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.01));
    LocalUpdates updates(model.ptr(), optimizer, group(), all[from]);
    TrainingState state(updates);
    train(model, updates, 0, 5);
    save(folder / "run", state, {.step = 5});
    auto mean = model->third->weight.detach().clone();
    group().all_reduce(mean, ReduceOp::avg).wait();
    for (size_t to = 0; to < all.size(); ++to) {
      SCOPED_TRACE(testing::Message() << from << " to " << to);
      auto other = seeded(4);
      torch::optim::SGD inner(other->parameters(), torch::optim::SGDOptions(0.01));
      LocalUpdates resumed(other.ptr(), inner, group(), all[to]);
      TrainingState its(resumed);
      const auto loaded = load(folder / "run", its);
      EXPECT_EQ(loaded.exact, from == to);
      EXPECT_EQ(resumed.steps(), from == to ? 5 : 0);
      const auto outer = resumed.state_dict().at("third.weight").tensors;
      if (from != to) EXPECT_LT(difference({other->third->weight}, {mean}), 1e-12);
      if (from != to && outer.contains("anchor")) EXPECT_LT(difference({outer.at("anchor")}, {mean}), 1e-12);
      if (from != to && outer.contains("momentum_buffer")) {
        EXPECT_EQ(outer.at("momentum_buffer").abs().max().item<double>(), 0);
      }
      train(other, resumed, 5, 9);
      EXPECT_LT(difference({other->third->weight}, {mean}), 0.5) << "steps are as large as before";
    }
  }
}

// Both wrappers have an optimizer.
struct Nested {
  Nested(int seed, const std::optional<at::ScalarType>& dtype) : param_dtype(dtype) {
    torch::manual_seed(seed);
    model = std::make_shared<MlpImpl>(12, 16, 5, at::kFloat);
    model->second->bias.set_requires_grad(false);
    model->third->bias.set_requires_grad(false);
    inner.emplace(model->second.ptr(), group(), FullyShardedDataParallelOptions{.param_dtype = dtype});
    outer.emplace(model, group(), FullyShardedDataParallelOptions{.param_dtype = dtype});
    inner_optimizer.emplace(*inner, options);
    outer_optimizer.emplace(*outer, options);
    inner_state.emplace(*inner, *inner_optimizer);
    outer_state.emplace(*outer, *outer_optimizer);
  }
  void train(int64_t from, int64_t to) {
    for (int64_t step = from; step < to; ++step) {
      mean_loss(outer->forward(batch(group().rank(), step).to(at::kFloat)).to(at::kFloat)).backward();
      inner_optimizer->step();
      outer_optimizer->step();
      inner_optimizer->zero_grad();
      outer_optimizer->zero_grad();
    }
  }
  std::map<std::string, at::Tensor> parameters() {
    auto all = outer->full_state_dict();
    for (const auto& [name, value] : inner->full_state_dict()) all["second." + name] = value;
    return all;
  }

  const torch::optim::AdamWOptions options{1e-2};
  std::optional<at::ScalarType> param_dtype;
  std::shared_ptr<MlpImpl> model;
  std::optional<FullyShardedDataParallel<torch::nn::LinearImpl>> inner;
  std::optional<FullyShardedDataParallel<MlpImpl>> outer;
  std::optional<FullyShardedOptimizer<FusedAdamW>> inner_optimizer, outer_optimizer;
  std::optional<TrainingState> inner_state, outer_state;
};

void expect_equal(const std::map<std::string, at::Tensor>& a, const std::map<std::string, at::Tensor>& b) {
  ASSERT_EQ(a.size(), 6);
  ASSERT_EQ(b.size(), 6);
  for (const auto& [name, value] : a) EXPECT_TRUE(at::equal(value, b.at(name))) << name;
}

TEST(TrainingCheckpoint, BEY05_FSDP22_a_wrapper_with_another_one_inside_saves_and_loads_the_whole_model) {
  for (const auto& dtype : {std::optional<at::ScalarType>(), std::optional(at::kBFloat16)}) {
    const SharedFolder folder;
    Nested running(3, dtype);
    running.train(0, 3);
    const auto expected = running.parameters();
    save(folder / "inner", *running.inner_state, {.step = 3});
    save(folder / "outer", *running.outer_state, {.step = 3});
    const CheckpointReader reader(folder / "outer");
    for (const auto& [name, tensor] : reader.index().tensors) {
      EXPECT_TRUE(tensor.part != "ranks" || name.find("weight") == std::string::npos) << name << " is stored again";
    }
    const auto alone = std::make_shared<MlpImpl>(12, 16, 5, at::kFloat);
    load_module(folder / "outer", *alone);
    for (const auto& item : alone->named_parameters()) {
      EXPECT_TRUE(at::equal(item.value(), expected.at(item.key()).to(at::kFloat))) << item.key();
    }
    running.train(3, 5);
    for (const bool inner_first : {true, false}) {
      Nested resumed(5, dtype);
      resumed.train(50, 51);
      if (inner_first) load(folder / "inner", *resumed.inner_state);
      EXPECT_TRUE(load(folder / "outer", *resumed.outer_state).exact);
      if (!inner_first) {
        expect_equal(resumed.parameters(), expected);
        EXPECT_TRUE(load(folder / "inner", *resumed.inner_state).exact);
      }
      expect_equal(resumed.parameters(), expected);
      resumed.train(3, 5);
      expect_equal(resumed.parameters(), running.parameters());
    }
  }
}

}  // namespace
}  // namespace shoal::test::checkpoint_carried_test
