// ShardedDataParallel: rows SDP01 to SDP12, beyond strategies_test.cpp, zoo_test.cpp and faults_test.cpp. Communication
// and memory are in sharded_ddp_buckets_test.cpp, frozen parameters in sharded_ddp_freezing_test.cpp, what earlier
// backwards have left in sharded_ddp_sums_test.cpp.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include "shoal/error.h"
#include "tests/strategy/zero/sharded_ddp_training.h"
#include "tests/support/refusal.h"

namespace shoal::test::sharded_ddp_test {
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
  EXPECT_THAT(said, testing::HasSubstr("give both the same ranks in the same order"));
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

struct WordsImpl : torch::nn::Module {
  WordsImpl() {
    words = register_module("words", torch::nn::Embedding(torch::nn::EmbeddingOptions(10, 4).sparse(true)));
    last = register_module("last", torch::nn::Linear(4, 3));
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) { return last(words(x)); }
  torch::nn::Embedding words{nullptr};
  torch::nn::Linear last{nullptr};
};

TEST(ShardedDdp, SDP02_sparse_gradients_stay_on_their_owners_alone_and_add_up) {
  const auto make = [] {
    torch::manual_seed(1);
    return std::make_shared<WordsImpl>();
  };
  const auto ids = [](int rank, int64_t step) { return at::tensor({rank, 3, static_cast<int>(step) % 10}, at::kLong); };
  auto model = make();
  auto reference = make();
  const torch::optim::SGDOptions plain(0.1);
  Sgd optimizer(model->parameters(), plain, group());
  ShardedDataParallel parallel(model, optimizer, group());
  torch::optim::SGD whole(reference->parameters(), plain);
  for (int64_t number = 0; number < 6; ++number) {
    mean_loss(parallel.forward(ids(group().rank(), number))).backward();
    for (int rank = 0; rank < group().size(); ++rank) {
      (mean_loss(reference->forward(ids(rank, number))) / group().size()).backward();
    }
    const auto& grad = model->words->weight.grad();
    const bool owner = optimizer.param_to_rank(model->words->weight) == group().rank();
    EXPECT_EQ(grad.defined() && grad.is_sparse(), owner) << "elsewhere is no memory of it";
    if (number % 2 == 0) continue;  // the next backward adds to it
    optimizer.step();
    optimizer.zero_grad();
    whole.step();
    whole.zero_grad();
  }
  EXPECT_LT(difference(model->parameters(), reference->parameters()), 1e-12);
}

// Trainable parameters lie in memory that the optimizer shares, with rank 0's values; the option is about the rest.
TEST(ShardedDdp, SDP01_SDP07_without_sync_at_startup_frozen_parameters_and_buffers_stay_each_ranks_own) {
  for (const bool sync : {true, false}) {
    torch::manual_seed(group().rank());
    torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::BatchNorm1d(4), torch::nn::Linear(4, 4));
    auto frozen = model->parameters()[0];
    frozen.requires_grad_(false);
    model->named_buffers()["1.running_mean"].fill_(group().rank());
    const auto own = frozen.detach().clone();
    Sgd optimizer(model->parameters(), sgd, group());
    ShardedDataParallel parallel(model, optimizer, group(),
                                 {.broadcast_buffers = false, .sync_models_at_startup = sync});
    EXPECT_EQ(at::equal(frozen, own), !sync || group().rank() == 0);
    EXPECT_EQ(model->named_buffers()["1.running_mean"][0].item<double>(), sync ? 0 : group().rank());
    auto trainable = model->parameters()[4].detach().clone();
    group().broadcast(trainable, 0).wait();
    EXPECT_TRUE(at::equal(trainable, model->parameters()[4]));
  }
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
}  // namespace shoal::test::sharded_ddp_test
