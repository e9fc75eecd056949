// clip_grad_norm_ of FSDP where gradients have a loss scale, and other calls after it.

#include <algorithm>
#include <cmath>
#include <optional>

#include "tests/strategy/all/gradients_loop.h"
#include "tests/support/refusal.h"

namespace shoal::test::scaled_gradients_test {
namespace {

using namespace gradients_loop;

// 16-bit module under FSDP with a loss scale, or a float32 module without.
struct Scaled {
  explicit Scaled(ShardingStrategy strategy, bool scaled, std::optional<at::ScalarType> reduce_dtype)
      : model(net()),
        parallel([&] {
          model->to(scaled ? at::kHalf : at::kFloat);
          return std::make_shared<FullyShardedDataParallel<NetImpl>>(
              model, group(),
              FullyShardedDataParallelOptions{.sharding_strategy = strategy, .reduce_dtype = reduce_dtype});
        }()),
        optimizer(*parallel, sgd_with_decay,
                  {.scaler = scaled ? std::optional(GradScalerOptions{.initial_scale = 1024, .hysteresis = 1})
                                    : std::nullopt}) {}
  void backward(int64_t number, double factor = 1) {
    const auto x = batch(group().rank(), number).to(model->first->weight.scalar_type());
    optimizer.scale_loss(factor * parallel->forward(x).to(at::kFloat).pow(2).mean()).backward();
  }

  Net model;
  std::shared_ptr<FullyShardedDataParallel<NetImpl>> parallel;
  FullyShardedOptimizer<torch::optim::SGD> optimizer;
};

class FsdpScaler : public ::testing::TestWithParam<ShardingStrategy> {};
INSTANTIATE_TEST_SUITE_P(, FsdpScaler, ::testing::Values(ShardingStrategy::full_shard, ShardingStrategy::no_shard));

TEST_P(FsdpScaler, clip_grad_norm_sees_gradients_without_the_scale) {
  for (const auto reduce : {std::optional<at::ScalarType>(), std::optional(at::kFloat)}) {
    Scaled plain(GetParam(), false, {}), scaled(GetParam(), true, reduce);
    for (int64_t number = 0; number < 3; ++number) {
      double norm = 0;
      for (auto* one : {&plain, &scaled}) {
        one->backward(number);
        const auto seen = one->parallel->clip_grad_norm_(0.05);
        if (one == &plain) {
          norm = seen;
        } else {
          EXPECT_NEAR(seen, norm, 0.02 * norm) << number;
          EXPECT_NEAR(one->parallel->clip_grad_norm_(1e9), std::min(norm, 0.05), 0.001) << "clipped once";
        }
        EXPECT_TRUE(one->optimizer.step().updated);
        one->optimizer.zero_grad();
      }
    }
    std::vector<at::Tensor> a, b;
    for (const auto& [name, value] : scaled.parallel->full_state_dict()) a.push_back(value);
    for (const auto& [name, value] : plain.parallel->full_state_dict()) b.push_back(value);
    EXPECT_LT(difference(a, b), 0.01);
  }
}

// Whose zeroing nobody can see.
struct WithEmptyImpl : torch::nn::Module {
  WithEmptyImpl() {
    layer = register_module("layer", torch::nn::Linear(12, 5));
    empty = register_parameter("empty", at::zeros({0, 7}));
  }
  at::Tensor forward(const at::Tensor& x) { return layer(x).pow(2).mean() + empty.sum(); }
  torch::nn::Linear layer{nullptr};
  at::Tensor empty;
};

TEST_P(FsdpScaler, zeroed_gradients_without_elements_go_on) {
  auto model = std::make_shared<WithEmptyImpl>();
  model->to(at::kHalf);
  FullyShardedDataParallel<WithEmptyImpl> parallel(model, group(), {.sharding_strategy = GetParam()});
  FullyShardedOptimizer<torch::optim::SGD> optimizer(parallel, sgd, {.scaler = GradScalerOptions{.initial_scale = 64}});
  for (int64_t number = 0; number < 3; ++number) {
    optimizer.scale_loss(parallel.forward(batch(group().rank(), number).to(at::kHalf))).backward();
    parallel.clip_grad_norm_(1);
    EXPECT_TRUE(optimizer.step().updated);
    optimizer.zero_grad(/*set_to_none=*/false);
  }
}

TEST(Megatron, zeroed_gradients_without_elements_go_on) {
  auto model = std::make_shared<WithEmptyImpl>();
  DistributedOptimizer<torch::optim::SGD> optimizer(model, sgd, group(), {.reuse_grad_buf_for_param_gather = true});
  for (int64_t number = 0; number < 3; ++number) {
    model->forward(batch(group().rank(), number).to(at::kFloat)).backward();
    optimizer.step();
    optimizer.zero_grad(/*set_to_none=*/false);
  }
}

TEST_P(FsdpScaler, clipping_then_other_calls) {
  Scaled one(GetParam(), true, at::kFloat);
  one.backward(0);
  one.parallel->clip_grad_norm_(0.05);
  one.backward(1);
  EXPECT_NE(test::refusal([&] { one.optimizer.step(); }).find("clipped"), std::string::npos)
      << "scaled gradients were added to some without a scale";
  group().barrier({-1, -1, "refused"}).wait();
  one.optimizer.zero_grad();
  one.backward(2);
  EXPECT_TRUE(one.optimizer.step().updated);
  EXPECT_NE(test::refusal([&] { one.optimizer.step(); }).find("loss scale"), std::string::npos);
  group().barrier({-1, -1, "refused"}).wait();
  one.optimizer.zero_grad();
  // clip_grad_norm_ finds an inf, and step() knows about it.
  const auto before = one.optimizer.scaler()->value();
  one.backward(3, 1e30);
  EXPECT_FALSE(std::isfinite(one.parallel->clip_grad_norm_(1)));
  EXPECT_FALSE(one.optimizer.step().updated);
  EXPECT_LT(one.optimizer.scaler()->value(), before);
  one.optimizer.zero_grad();
  one.backward(4);
  one.parallel->clip_grad_norm_(1);
  one.optimizer.zero_grad();
  EXPECT_TRUE(one.optimizer.step().updated) << "with nothing";
}

}  // namespace
}  // namespace shoal::test::scaled_gradients_test
