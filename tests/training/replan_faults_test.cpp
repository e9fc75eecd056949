// Ranks that die while the others change their strategy (ELA07).

#include <gmock/gmock.h>

#include <csignal>

#include "shoal/error.h"
#include "shoal/training.h"
#include "tests/support/forked_ranks.h"
#include "tests/support/models.h"

namespace shoal::replan_faults_test {
namespace {

// Of the second optimizer, which replan() makes, on the rank that dies; before: it dies instead of calling replan().
std::string change_while_rank_1_dies(const World& world, bool before) {
  auto recipe = optimizer_recipe<FusedAdamW>(torch::optim::AdamWOptions(1e-2));
  int made = 0;
  recipe.make = [&made, &world, make = recipe.make](const OptimizerRecipe::ParamGroups& groups) {
    if (++made == 2 && world.rank() == 1) std::raise(SIGKILL);
    return make(groups);
  };
  auto training = make_training("fsdp", test::seeded(3), recipe, world.group());
  training->backward(training.forward(test::batch(world.rank(), 0)).pow(2).mean());
  training->step();
  training->zero_grad();
  if (before && world.rank() == 1) std::raise(SIGKILL);
  try {
    training.replan("zero1");
  } catch (const CommError& error) {
    std::string text = error.what();
    try {
      training->zero_grad();
      if (!before) text += "; it can still be used";
    } catch (const UsageError& gone) {
      text += std::string("; ") + gone.what();
    }
    return text;
  }
  return "it changed";
}

TEST(ReplanFaults, ELA07_a_death_is_a_comm_error_on_the_others) {
  for (const bool before : {true, false}) {
    const auto start = std::chrono::steady_clock::now();
    const auto ended = test::run_ranks(3, [&](const World& world) { return change_while_rank_1_dies(world, before); });
    for (const int rank : {0, 2}) {
      EXPECT_THAT(ended[rank].text, testing::HasSubstr("rank 1")) << before;
      if (before) continue;
      EXPECT_THAT(ended[rank].text, testing::HasSubstr("the training is gone"));
    }
    EXPECT_TRUE(WIFSIGNALED(ended[1].status));
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(40));
  }
}

}  // namespace
}  // namespace shoal::replan_faults_test
