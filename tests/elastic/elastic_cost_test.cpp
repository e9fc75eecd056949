// What readiness for a death costs in a step: messages and memory, beside the same training without Elastic.

#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <sstream>

#include "shoal/elastic.h"
#include "shoal/optim.h"
#include "shoal/plan.h"
#include "shoal/training.h"
#include "tests/support/forked_ranks.h"
#include "tests/support/page_meter.h"

namespace shoal::elastic_cost_test {
namespace {

constexpr int64_t layers = 24;
constexpr int64_t width = 512;

struct StackImpl : torch::nn::Module {
  StackImpl() {
    torch::manual_seed(1);
    for (int64_t i = 0; i < layers; ++i) {
      list.push_back(register_module(std::to_string(i), torch::nn::Linear(width, width)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : list) x = layer(x);
    return x;
  }
  std::vector<torch::nn::Linear> list;
};
TORCH_MODULE(Stack);

struct Cost {
  int64_t calls = 0;  // of a rank, in the measured steps
  int64_t sent = 0;   // bytes
  int64_t pages = 0;  // bytes of all ranks after them, by the kernel's count
};

constexpr int measured_steps = 4;

std::string measure(const World& world, const std::string& strategy, bool elastic) {
  alarm(120);
  test::return_freed_memory();
  const auto before = test::proportional_bytes();
  auto training = make_training(strategy, Stack(), optimizer_recipe<FusedAdamW>(1e-3), world.group());
  std::optional<Elastic> guard;
  if (elastic) guard.emplace(world, *training);
  const auto x = at::ones({2, width});
  const auto step = [&] {
    const auto compute = [&] { training.forward(x).sum().backward(); };
    const auto update = [&] { training->step(); };
    if (guard) {
      guard->step(1, compute, update);
    } else {
      compute();
      update();
    }
    training->zero_grad();
  };
  for (int i = 0; i < 4; ++i) step();
  const auto start = world.group().statistics();
  for (int i = 0; i < measured_steps; ++i) step();
  const auto end = world.group().statistics();
  world.barrier();
  malloc_trim(0);
  const auto pages = test::proportional_bytes() - before;
  world.barrier();  // pages that ranks share are divided among those that live
  if (guard && guard->steps() != 4 + measured_steps) return "Elastic has not counted all steps";
  return fmt::format("{} {} {}", end.calls - start.calls, end.bytes - start.bytes, pages);
}

Cost cost_of(const std::string& strategy, bool elastic, int ranks = 2, const std::string& transport = "auto") {
  Cost all;
  WorldOptions options;
  options.transport = transport;
  const auto ended = test::run_ranks(
      ranks, [&](const World& world) { return measure(world, strategy, elastic); }, {}, options);
  for (const auto& rank : ended) {
    Cost one;
    std::istringstream(rank.text) >> one.calls >> one.sent >> one.pages;
    EXPECT_GT(one.pages, 0) << rank.text;
    all.calls = std::max(all.calls, one.calls);
    all.sent = std::max(all.sent, one.sent);
    all.pages += one.pages;
  }
  return all;
}

class ElasticCost : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, ElasticCost, testing::ValuesIn(elastic_strategies()),
                         [](const auto& info) { return info.param; });

// The commit of a step sends a few numbers, of sharded strategies in place of those that an update sends otherwise.
// Parameters, state and gradients stay where they are.
TEST_P(ElasticCost, ELA03_a_step_sends_no_more_than_its_commit_and_memory_is_within_5_percent) {
  const auto plain = cost_of(GetParam(), false);
  const auto guarded = cost_of(GetParam(), true);
  EXPECT_LE(guarded.calls - plain.calls, 2 * measured_steps);
  EXPECT_LE(guarded.sent - plain.sent, 200 * measured_steps);
  const auto parameters = static_cast<double>(4 * layers * width * (width + 1));
  EXPECT_GT(static_cast<double>(plain.pages), 2 * parameters) << "parameters and state were counted";
  if (test::counts_freed_memory) return;
  const double ratio = static_cast<double>(guarded.pages) / static_cast<double>(plain.pages);
  fmt::print("{}: memory {:.1f} MiB without, {:.1f} MiB with Elastic, {:.3f} times\n", GetParam(),
             static_cast<double>(plain.pages) / (1 << 20), static_cast<double>(guarded.pages) / (1 << 20), ratio);
  EXPECT_LE(ratio, 1.05);
}

class ElasticSecondOwnerCost : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, ElasticSecondOwnerCost, testing::Values("fsdp", "megatron", "zero1", "zero2"),
                         [](const auto& info) { return info.param; });

// Each rank is the second owner of a third of the model.
TEST_P(ElasticSecondOwnerCost, ELA04_second_owners_take_the_memory_and_the_messages_that_plan_says) {
  constexpr int ranks = 3;
  const auto planned = plan(Stack(), optimizer_recipe<FusedAdamW>(1e-3),
                            {.ranks = ranks, .strategies = {GetParam()}, .elastic = true, .one_host = false})
                           .strategies.front();
  const bool has_sums = GetParam() == "zero1";  // of all ranks, and so no copies
  const int64_t bytes_per_element =
      8 + (has_sums ? 0 : 4) + (GetParam() == "fsdp" ? 4 : 0);  // AdamW's state, gradient, parameter
  constexpr int64_t parameters = layers * width * (width + 1);
  EXPECT_NEAR(static_cast<double>(planned.largest().second_owner_bytes),
              static_cast<double>(parameters * bytes_per_element / ranks), 1e5);
  // The question, and buckets that are sent and received: one, or several of each owner.
  const bool has_several = GetParam() == "zero2";
  if (!has_several) EXPECT_EQ(planned.to_second_owners.calls, has_sums ? 1 : 3);
  EXPECT_NEAR(static_cast<double>(planned.to_second_owners.bytes), has_sums ? 0 : 2.0 * 4 * parameters / ranks, 1e5);
  const auto plain = cost_of(GetParam(), false, ranks, "tcp");
  const auto guarded = cost_of(GetParam(), true, ranks, "tcp");
  const auto commit_bytes = static_cast<int64_t>(sizeof(double)) * (12 + ranks);
  // The commit, and, where parameters are sent behind it, the question whether all have them.
  const int questions = GetParam() == "fsdp" ? 0 : 1;
  EXPECT_EQ(guarded.calls - plain.calls, measured_steps * (planned.to_second_owners.calls + 1 + questions));
  const auto question_bytes = static_cast<int64_t>(sizeof(double)) * 2 * questions;
  const auto expected = measured_steps * (planned.to_second_owners.bytes + commit_bytes + question_bytes);
  // The plan's bytes are those of rank 0; another one may own two biases more.
  const auto tolerance = static_cast<double>(has_several ? measured_steps * 2 * 4 * width : 0);
  EXPECT_NEAR(static_cast<double>(guarded.sent - plain.sent), static_cast<double>(expected), tolerance);
  if (test::counts_freed_memory) return;
  const auto more = static_cast<double>(guarded.pages - plain.pages) / ranks;
  fmt::print("second owners: {:.1f} MiB more per rank, {:.1f} planned\n", more / (1 << 20),
             static_cast<double>(planned.largest().second_owner_bytes) / (1 << 20));
  EXPECT_NEAR(more, static_cast<double>(planned.largest().second_owner_bytes),
              0.1 * static_cast<double>(planned.largest().second_owner_bytes));
}

}  // namespace
}  // namespace shoal::elastic_cost_test
