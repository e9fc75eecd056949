// Changes of strategy and of ranks, one after the other, equal the run without them (ELA07).

#include <gtest/gtest.h>

#include <numeric>
#include <optional>

#include "tests/training/replan_training.h"

namespace shoal::replan_chain_test {
namespace {

using namespace replan_training;

std::vector<at::Tensor> tensors_of(const OptimizerState& state) {
  std::vector<at::Tensor> list;
  for (const auto& [name, entry] : state) {
    for (const auto& [field, tensor] : entry.tensors) list.push_back(tensor);
  }
  return list;
}

// Parameters, buffers and the optimizer's state. Collective.
void expect_same_position(Training<test::MlpImpl>& a, Training<test::MlpImpl>& b) {
  const auto values = whole(a);
  const auto state = a->optimizer_state();
  EXPECT_FALSE(state.empty());
  if (sums_in_rank_order()) {
    expect_equal(values, whole(b));
    expect_equal(state, b->optimizer_state());
  } else {
    EXPECT_LT(test::difference(values, whole(b)), 1e-5);
    EXPECT_LT(test::difference(tensors_of(state), tensors_of(b->optimizer_state())), 1e-5);
  }
}

class Chain : public testing::TestWithParam<bool> {};

// Before and after each switch, and at the end.
TEST_P(Chain, ELA07_ddp_zero1_fsdp_megatron_ddp_equals_the_uninterrupted_run) {
  const auto recipe = GetParam() ? adamw() : sgd();
  // Without batch norm, whose running means each rank has for itself where nobody broadcasts them.
  const auto start = [&] {
    torch::manual_seed(3);
    return make_training("ddp", test::Mlp(12, 16, 5, at::kFloat), recipe, group(), options_of("ddp"));
  };
  auto training = start();
  const auto parameters = training.module()->parameters();
  auto uninterrupted = start();
  const std::vector<std::string> strategies{"zero1", "fsdp", "megatron", "ddp"};
  for (size_t i = 0; i < strategies.size(); ++i) {
    SCOPED_TRACE(training->strategy().name + " -> " + strategies[i]);
    steps(training, 2 * i, 2 * i + 2);
    steps(uninterrupted, 2 * i, 2 * i + 2);
    expect_same_position(training, uninterrupted);
    const auto done = training.replan(strategies[i], options_of(strategies[i]));
    EXPECT_EQ(done.to, strategies[i]);
    EXPECT_EQ(done.ranks, group().size());
    EXPECT_TRUE(done.differences.empty()) << done.differences.front();
    EXPECT_EQ(training->strategy().name, strategies[i]);
    for (size_t p = 0; p < parameters.size(); ++p) {
      EXPECT_TRUE(parameters[p].is_same(training.module()->parameters()[p])) << "identity";
    }
    expect_same_position(training, uninterrupted);
  }
  steps(training, 8, 10);
  steps(uninterrupted, 8, 10);
  expect_same_position(training, uninterrupted);
}

INSTANTIATE_TEST_SUITE_P(Replan, Chain, testing::Bool(),
                         [](const auto& it) { return std::string(it.param ? "adamw" : "sgd_momentum"); });

// The group of these ranks, where this one is among them.
std::optional<Group> ranks_below(int size) {
  if (group().rank() >= size) return std::nullopt;
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return group().subgroup(ranks);
}

TEST(Replan, ELA07_the_number_of_ranks_changes_in_one_run) {
  if (group().size() < 3) return;
  const int most = group().size();
  using Names = std::vector<std::string>;
  for (const auto& names :
       {Names{"fsdp", "megatron", "zero1", "ddp"}, Names{"zero2", "fsdp", "decentralized", "fsdp_no_shard"},
        Names{"fsdp", "fsdp", "fsdp", "fsdp"}}) {
    const auto module = net(group().rank() < most ? 3 : 4);
    std::optional<Training<NetImpl>> training = make_training(names[0], module, adamw(), group(), options_of(names[0]));
    const std::vector<int> sizes{most, most - 1, most, most - 2};
    for (size_t i = 0; i < sizes.size(); ++i) {
      SCOPED_TRACE(names[i] + " at " + std::to_string(sizes[i]));
      if (i > 0) {
        std::vector<at::Tensor> before;
        OptimizerState state;
        if (training) {
          before = whole(*training);
          state = (*training)->optimizer_state();
        }
        const auto ranks = ranks_below(sizes[i]);
        const auto done = replan(training, names[i], module, adamw(), ranks, group(), options_of(names[i]));
        EXPECT_EQ(done.ranks_before, sizes[i - 1]);
        EXPECT_EQ(done.ranks, sizes[i]);
        ASSERT_EQ(training.has_value(), ranks.has_value());
        if (training) {
          const auto after = whole(*training);
          std::vector<std::string> texts;
          for (const auto& tensor : after) texts.push_back(std::to_string(tensor.to(at::kDouble).sum().item<double>()));
          agree(*ranks, "parameters after the change", texts);
          const bool mean = names[i - 1] == "decentralized";  // ranks have other values
          if (group().rank() == 0 && !mean) {
            expect_equal(after, before);
          }
          const auto now = (*training)->optimizer_state();
          if (group().rank() == 0 && !mean) expect_equal(now, state);
        }
      }
      if (training) steps(*training, 3 * i, 3 * i + 3);
      group().barrier().wait();
    }
  }
}

}  // namespace
}  // namespace shoal::replan_chain_test
