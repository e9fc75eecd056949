// Times at which FullyShardedDataParallel gathers units, from the log of collectives. None where ranks share memory.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include "shoal/call_log.h"
#include "tests/strategy/all/warnings.h"
#include "tests/strategy/fsdp/fsdp_training.h"

namespace shoal::test::fsdp_gathers_test {
namespace {

int64_t gathers(const CallLog& log) {
  int64_t count = 0;
  for (const auto& record : log.records()) {
    count += record.op == Op::all_gather && record.label.what.starts_with("unit ") ? 1 : 0;
  }
  return count;
}

// Three units, of which one may be in memory.
std::vector<int64_t> gathers_of_steps(Options options, int steps) {
  options.auto_wrap_policy = wrap_type<torch::nn::LinearImpl>();
  options.unit_limit = 1;
  options.prefetch_units = 0;
  const auto log = std::make_shared<CallLog>();
  FullyShardedDataParallel<MlpImpl> parallel(make_mlp(), group().recorded(log), options);
  if (parallel.shared()) return {};
  FullyShardedOptimizer<torch::optim::SGD> optimizer(parallel, sgd);
  std::vector<int64_t> counts;
  for (int64_t step = 0; step < steps; ++step) {
    log->clear();
    mean_loss(parallel.forward(batch(group().rank(), step))).backward();
    optimizer.step();
    optimizer.zero_grad();
    counts.push_back(gathers(*log));
  }
  return counts;
}

TEST(FsdpGathers, FSDP01_with_grad_op_parameters_stay_from_forward_to_the_end_of_backward) {
  using Counts = std::vector<int64_t>;
  const auto full = gathers_of_steps({}, 3);
  if (full.empty()) GTEST_SKIP() << "nothing is gathered here";
  EXPECT_EQ(full, (Counts{4, 4, 4})) << "first to third, and the second for backward";
  EXPECT_EQ(gathers_of_steps({.sharding_strategy = ShardingStrategy::shard_grad_op}, 3), (Counts{3, 3, 3}));
  if (group().size() != 4) return;
  EXPECT_EQ(gathers_of_steps({.sharding_strategy = ShardingStrategy::hybrid_shard, .shard_size = 2}, 3),
            (Counts{4, 4, 4}));
  EXPECT_EQ(gathers_of_steps({.sharding_strategy = ShardingStrategy::hybrid_shard_grad_op, .shard_size = 2}, 3),
            (Counts{3, 3, 3}));
}

TEST(FsdpGathers, FSDP01_hybrid_shard_grad_op_trains_as_one_process) {
  auto options = by_layer();
  options.sharding_strategy = ShardingStrategy::hybrid_shard_grad_op;
  options.shard_size = group().size() % 2 == 0 ? 2 : 1;
  expect_equal_training<MlpImpl>(
      make_mlp, [](auto& model, MlpImpl&, const at::Tensor& x) { return mean_loss(model.forward(x)); }, options);
}

// Four layers that report when they are in memory, before they compute, and when they have been used.
struct ProbedImpl : torch::nn::Module {
  ProbedImpl() {
    for (const auto* name : {"a", "b", "c", "d"}) layers.push_back(register_module(name, torch::nn::Linear(5, 5)));
    to(at::kDouble);
  }
  at::Tensor forward(at::Tensor x) {
    for (size_t i = 0; i < layers.size(); ++i) {
      auto& layer = layers[backwards ? layers.size() - 1 - i : i];
      const auto taken = layer->bias.detach().sum();
      there();
      x = layer(x);
      seen();
    }
    x.register_hook([this](const at::Tensor&) { seen(); });
    return x;
  }
  std::vector<torch::nn::Linear> layers;
  std::function<void()> there = [] {};
  std::function<void()> seen = [] {};
  bool backwards = false;
};

TEST(FsdpGathers, FSDP08_prefetch_units_says_how_many_gathers_are_ahead_of_use) {
  for (const size_t ahead : {0, 1, 2}) {
    const auto log = std::make_shared<CallLog>();
    auto options = by_layer();
    options.unit_limit = ahead + 1;
    options.prefetch_units = ahead;
    const auto model = std::make_shared<ProbedImpl>();
    FullyShardedDataParallel<ProbedImpl> parallel(model, group().recorded(log), options);
    if (parallel.shared()) GTEST_SKIP() << "nothing is gathered here";
    FullyShardedOptimizer<torch::optim::SGD> optimizer(parallel, sgd);
    std::vector<int64_t> counts;
    model->seen = [&] { counts.push_back(gathers(*log)); };
    std::vector<int64_t> before;
    model->there = [&] { before.push_back(gathers(*log)); };
    const auto step = [&] {
      log->clear();
      counts.clear();
      before.clear();
      parallel.forward(at::ones({2, 5}, at::kDouble)).sum().backward();
      counts.push_back(gathers(*log));
      optimizer.step();
      optimizer.zero_grad();
      return counts;
    };
    const int64_t n = static_cast<int64_t>(ahead);
    // After each layer of forward, before and after backward: forward gathers 4 units, backward 2, because the last one
    // is still in memory and the first one is not needed.
    EXPECT_EQ(step(), (std::vector<int64_t>{1, 2, 3, 4, 4, 6})) << "the first pass knows no order";
    EXPECT_EQ(before, (std::vector<int64_t>{1, 2, 3, 4}));
    for (int pass = 0; pass < 2; ++pass) {
      const auto seen = step();
      EXPECT_EQ(before, std::vector<int64_t>(seen.begin(), seen.begin() + 4)) << "gathers begin before the computation";
      // With two ahead, backward's gathers begin while their units are still in memory, one of them in vain.
      if (ahead == 2) {
        EXPECT_EQ(std::vector<int64_t>(seen.begin(), seen.begin() + 2), (std::vector<int64_t>{3, 4}));
      } else {
        EXPECT_EQ(seen, (std::vector<int64_t>{1 + n, 2 + n, 3 + n, 4 + n, 4 + n, 6})) << ahead << " ahead";
      }
    }
  }
}

TEST(FsdpGathers, FSDP09_a_change_of_order_from_pass_to_pass_is_warned_of_once) {
  auto options = by_layer();
  options.check_unit_order = true;
  const auto model = std::make_shared<ProbedImpl>();
  FullyShardedDataParallel<ProbedImpl> parallel(model, group(), options);
  if (parallel.shared()) GTEST_SKIP() << "nothing is gathered here";
  const Warnings warnings;
  const auto pass = [&](bool backwards, bool training) {
    model->backwards = backwards;
    const at::AutoGradMode mode(training);
    auto x = at::ones({2, 5}, at::kDouble);
    if (training) {
      parallel.forward(x).sum().backward();
      return;
    }
    model->seen = [] {};
    const auto y = model->layers[0](x);  // outside of passes: units may be there already when one begins
    parallel->layers[0](y);
  };
  for (int i = 0; i < 3; ++i) {
    pass(false, true);
    pass(false, false);
  }
  EXPECT_THAT(warnings.list(), testing::IsEmpty());
  for (const bool backwards : {true, true, false, false, true}) pass(backwards, true);
  ASSERT_EQ(warnings.list().size(), 1U) << testing::PrintToString(warnings.list());
  EXPECT_THAT(warnings.list()[0], testing::HasSubstr("it was unit a, unit b, unit c, unit d"));
  EXPECT_THAT(warnings.list()[0], testing::HasSubstr("now it is unit d, unit c, unit b, unit a"));
}

}  // namespace
}  // namespace shoal::test::fsdp_gathers_test
