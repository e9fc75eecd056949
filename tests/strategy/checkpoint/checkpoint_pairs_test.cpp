// Checkpoints of every strategy with every number of ranks, loaded into every other.

#include <algorithm>

#include "tests/strategy/checkpoint/checkpoint_training.h"

namespace shoal::checkpoint_pairs_test {
namespace {

const Group& group() {
  return test::world().group();
}

class Pairs : public testing::TestWithParam<std::string> {};

// Each pair of strategies at half of the pairs of sizes, which other strategies complete.
TEST_P(Pairs, BEY05_any_strategy_at_any_number_of_ranks_takes_it) {
  const test::SharedFolder folder;
  const auto run_of = [&](int ranks) { return folder / ("ranks-" + std::to_string(ranks)); };
  for (int from = 1; from <= group().size(); ++from) {
    if (const auto ranks = test::first_ranks(from)) {
      const auto running = test::start(GetParam(), *ranks, from);
      test::train(*running, *ranks, 0, 2);
      save(run_of(from), *running->state, {.step = 2});
      const CheckpointReader reader(run_of(from));
      const bool own_values = GetParam() == "decentralized" || GetParam() == "diloco" || GetParam() == "shard_gossip";
      own_values ? test::expect_mean(*running, *ranks, reader) : test::expect_holds(*running, reader);
    }
    group().barrier().wait();
  }
  const auto number_of = [](const std::string& strategy) {
    const auto all = test::all_strategies();
    return std::find(all.begin(), all.end(), strategy) - all.begin();
  };
  for (const auto& strategy : test::all_strategies()) {
    const auto pair = number_of(GetParam()) + number_of(strategy);
    for (int to = 1; to <= group().size(); ++to) {
      const auto ranks = test::first_ranks(to);
      for (int from = 1; ranks && from <= group().size(); ++from) {
        if ((pair + from + to) % 2 != 0) continue;
        SCOPED_TRACE(GetParam() + " at " + std::to_string(from) + " -> " + strategy + " at " + std::to_string(to));
        const auto running = test::start(strategy, *ranks, 7);
        const auto loaded = load(run_of(from), *running->state);
        if (loaded.exact) continue;  // checkpoint_test
        const CheckpointReader reader(run_of(from));
        test::expect_holds(*running, reader);
        test::expect_buffers(*running, reader);
      }
      group().barrier().wait();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Pairs, testing::ValuesIn(test::all_strategies()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace shoal::checkpoint_pairs_test
