// A change of strategy between any two equals a save and a load (BEY15).

#include <gtest/gtest.h>

#include <set>

#include "tests/support/shared_folder.h"
#include "tests/training/replan_training.h"

namespace shoal::replan_pairs_test {
namespace {

using namespace replan_training;

bool has_state(const Strategy& strategy) {
  if (strategy.synchronization == Synchronization::single_rank) return group().size() == 1;
  return strategy.synchronization != Synchronization::independent;
}

class Pairs : public testing::TestWithParam<std::string> {};

// Over Gloo, where steps are slow, one of each kind.
bool is_looked_at(const std::string& strategy) {
  const std::set<std::string> kinds{"ddp", "zero2", "megatron", "fsdp", "hybrid", "diloco", "decentralized"};
  return group().transport() != "gloo" || kinds.contains(strategy);
}

TEST_P(Pairs, BEY15_equals_a_save_and_a_load) {
  if (group().size() > 2) return;
  if (!is_looked_at(GetParam())) return;
  if (!has_state(find_strategy(GetParam()))) return;  // local: see the refusals
  const test::SharedFolder folder;
  {
    auto training = make_training(GetParam(), net(3), adamw(), group(), options_of(GetParam()));
    steps(training, 0, 3);
    auto state = training->state();
    save(folder / "run", *state, {.step = 3});
  }
  const auto resumed = [&](const std::string& name) {
    auto training = make_training(name, net(4), adamw(), group(), options_of(name));
    auto state = training->state();
    load(folder / "run", *state);
    return training;
  };
  for (const auto& name : strategy_names()) {
    if (!has_state(find_strategy(name)) || !is_looked_at(name)) continue;
    if (group().size() == 1 && name != "none" && GetParam() != "none") continue;  // at 2 ranks
    SCOPED_TRACE(GetParam() + " -> " + name);
    auto training = resumed(GetParam());
    auto loaded = resumed(name);
    const auto done = training.replan(name, options_of(name));
    EXPECT_EQ(done.ranks_before, group().size());
    expect_equal(whole(training), whole(loaded));
    expect_equal(training->optimizer_state(), loaded->optimizer_state());
    EXPECT_EQ(training->optimizer().param_groups().front().options().get_lr(), 1e-2);
    steps(training, 3, 5);
    steps(loaded, 3, 5);
    expect_equal(whole(training), whole(loaded));
  }
}

INSTANTIATE_TEST_SUITE_P(Replan, Pairs, testing::ValuesIn(strategy_names()), [](const auto& it) { return it.param; });

}  // namespace
}  // namespace shoal::replan_pairs_test
