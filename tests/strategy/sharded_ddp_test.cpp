// ShardedDataParallel: rows SDP01 to SDP12, beyond what strategies_test.cpp, zoo_test.cpp and faults_test.cpp show.
// What travels when, and what memory it takes, is in sharded_ddp_buckets_test.cpp.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include "shoal/base/error.h"
#include "tests/strategy/sharded_ddp_training.h"
#include "tests/support/refusal.h"

namespace shoal::test {
namespace {

TEST(ShardedDdp, SDP01_several_optimizers_over_disjoint_parameters) {
  auto model = seeded(1);
  Reference reference(seeded(1));
  auto head = model->third->parameters();
  auto body = model->first->parameters();
  for (const auto& parameter : model->second->parameters()) body.push_back(parameter);
  Sgd first(body, sgd, group());
  Sgd second(head, sgd, group());
  ShardedDataParallel parallel(model, {&first, &second}, group());
  for (int64_t number = 0; number < 4; ++number) {
    step(parallel, {&first, &second}, number);
    reference.step(number);
  }
  EXPECT_LT(difference(model->parameters(), reference.model()->parameters()), 1e-12);
}

TEST(ShardedDdp, SDP01_a_parameter_in_two_optimizers_or_in_none_is_named) {
  auto model = seeded(1);
  const auto expect_refused = [&](const std::vector<OSSCore*>& optimizers, const std::string& because) {
    try {
      ShardedDataParallel parallel(model, optimizers, group());
      ADD_FAILURE() << because;
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find(because), std::string::npos) << error.what();
    }
  };
  Sgd body(model->first->parameters(), sgd, group());
  Sgd all(model->parameters(), sgd, group());
  expect_refused({&body}, "parameter second.weight belongs to no optimizer");
  expect_refused({&all, &body}, "parameter first.weight is in two optimizers");
  expect_refused({}, "at least one OSS");
  EXPECT_THROW((ShardedDataParallel(model, all, group(), {.reduce_buffer_size = 0})), UsageError);
}

TEST(ShardedDdp, SDP01_an_optimizer_over_the_ranks_in_another_order_is_refused) {
  if (group().size() < 2) GTEST_SKIP() << "needs 2 ranks";
  std::vector<int> reversed;
  for (int rank = group().size(); rank-- > 0;) reversed.push_back(rank);
  const auto other = group().subgroup(reversed);
  auto model = seeded(1);
  Sgd optimizer(model->parameters(), sgd, other);
  const auto said = refusal([&] { ShardedDataParallel(model, optimizer, group()); });
  EXPECT_THAT(said, testing::HasSubstr("give both one group, with the same ranks in the same order"));
  ShardedDataParallel parallel(model, optimizer, other);
  step(parallel, {&optimizer}, 0);
}

TEST(ShardedDdp, SDP02_gradients_stay_on_their_owners_alone) {
  auto model = seeded(1);
  Sgd optimizer(model->parameters(), sgd, group());
  ShardedDataParallel parallel(model, optimizer, group());
  for (int number = 0; number < 2; ++number) {
    optimizer.zero_grad();
    mean_loss(parallel.forward(batch(group().rank(), number))).backward();
    auto reference = seeded(1);
    for (int rank = 0; rank < group().size(); ++rank) {
      (mean_loss(reference->forward(batch(rank, number))) / group().size()).backward();
    }
    for (size_t i = 0; i < model->parameters().size(); ++i) {
      const auto parameter = model->parameters()[i];
      if (optimizer.param_to_rank(parameter) == group().rank()) {
        EXPECT_LT(difference({parameter.grad()}, {reference->parameters()[i].grad()}), 1e-12);
      } else {
        EXPECT_THROW(parameter.grad().sum(), UsageError) << "a stand-in";
      }
    }
  }
}

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

TEST(ShardedDdp, SDP08_parameters_on_several_device_types_are_refused_with_a_list) {
  auto model = seeded(1);
  Sgd optimizer(model->parameters(), sgd, group());
  model->register_parameter("elsewhere", at::empty({2}, at::TensorOptions(at::kMeta)), false);
  try {
    ShardedDataParallel parallel(model, optimizer, group());
    ADD_FAILURE();
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("CPU (first.weight), META (elsewhere)"), std::string::npos)
        << error.what();
  }
}

TEST(ShardedDdp, SDP10_runs_are_reproducible_to_the_last_bit) {
  std::vector<std::vector<at::Tensor>> runs;
  for (int run = 0; run < 3; ++run) {
    auto model = seeded(1);
    Sgd optimizer(model->parameters(), sgd, group());
    ShardedDataParallel parallel(model, optimizer, group(), {.reduce_buffer_size = 100});
    for (int64_t number = 0; number < 10; ++number) step(parallel, {&optimizer}, number);
    auto& run_result = runs.emplace_back();
    for (const auto& parameter : model->parameters()) run_result.push_back(parameter.detach().clone());
  }
  for (size_t i = 0; i < runs[0].size(); ++i) {
    EXPECT_TRUE(at::equal(runs[0][i], runs[1][i]) && at::equal(runs[0][i], runs[2][i]));
  }
}

TEST(ShardedDdp, SDP11_zero_grad_in_place_and_a_change_of_dtype_keep_training_right) {
  auto model = seeded(1);
  Reference reference(seeded(1));
  Sgd optimizer(model->parameters(), sgd, group());
  ShardedDataParallel parallel(model, optimizer, group());
  for (int64_t number = 0; number < 3; ++number) {
    mean_loss(parallel.forward(batch(group().rank(), number))).backward();
    optimizer.step();
    optimizer.zero_grad(/*set_to_none=*/false);
    reference.step(number);
  }
  EXPECT_LT(difference(model->parameters(), reference.model()->parameters()), 1e-12);
  optimizer.zero_grad();
  model->to(at::kFloat);
  const auto before = model->first->weight.detach().clone();
  mean_loss(parallel.forward(batch(group().rank(), 3).to(at::kFloat))).backward();
  for (const auto& parameter : optimizer.local_params()) EXPECT_EQ(parameter.grad().scalar_type(), at::kFloat);
  EXPECT_EQ(model->first->weight.scalar_type(), at::kFloat);
}

TEST(ShardedDdp, SDP07_rank_0s_values_and_buffers_reach_all_ranks) {
  torch::manual_seed(group().rank());
  torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::BatchNorm1d(4));
  Sgd optimizer(model->parameters(), sgd, group());
  ShardedDataParallel parallel(model, optimizer, group());
  const auto same = [&](const at::Tensor& tensor) {
    auto first = tensor.detach().clone();
    group().broadcast(first, 0).wait();
    return at::equal(first, tensor);
  };
  torch::manual_seed(0);
  torch::nn::Linear of_rank_0(4, 4);
  EXPECT_TRUE(at::equal(model->parameters()[0], of_rank_0->weight));
  parallel.forward(at::randn({8, 4}) + group().rank()).sum().backward();
  optimizer.zero_grad();
  const auto mean = model->named_buffers()["1.running_mean"];
  EXPECT_EQ(same(mean), group().rank() == 0) << "each rank has seen its own batch";
  auto expected = mean.clone();
  group().broadcast(expected, 0).wait();
  model->eval();
  parallel.forward(at::ones({2, 4})).sum().backward();
  EXPECT_TRUE(at::equal(mean, expected)) << "sent before forward";
}

}  // namespace
}  // namespace shoal::test
