// Processes that come to an elastic job which keeps its global batch: its losses are those of ranks that do not change.

#include <gtest/gtest.h>

#include "tests/elastic/elastic_join.h"

namespace shoal::elastic_join_batch_test {
namespace {

using test::JoinJob;
using test::reach;

// A global batch of 36 samples in 12 shares. Writes down the loss of a fixed batch after each step, and who takes a
// sample.
constexpr int whole_epochs = 4;
constexpr size_t whole_samples = 180;

struct Whole {
  test::Record record;
  std::atomic<int> taken[whole_epochs][whole_samples];
};

using SharedWhole = test::InSharedMemory<Whole>;

std::string train_whole(const World& world, Whole& whole, test::Sharding sharding) {
  alarm(60);
  auto& record = whole.record;
  const int self = test::member_number(world);
  auto net = std::make_shared<test::Net>();
  net->to(at::kDouble);
  const auto wrapped = test::wrap_as({.sharding = sharding, .dtype = at::kDouble}, net, world.group());
  DistributedSampler sampler(whole_samples, world.group(), {.seed = 3});
  const auto quiet = [](const ElasticChange&) {};
  const auto made =
      wrapped.elastic(world, sampler, ElasticOptions{.keep_global_batch = 36, .batch_slices = 12, .on_change = quiet});
  auto& elastic = *made;
  const auto seen = test::inputs_of({1, 2, 3}).to(at::kDouble);
  for (auto epoch = elastic.first_epoch(); epoch < whole_epochs; ++epoch) {
    sampler.set_epoch(epoch);
    while (elastic.in_epoch()) {
      auto part = sampler;
      part.reset();
      while (const auto batch = part.next(static_cast<size_t>(elastic.batch_size()))) {
        const auto x = test::inputs_of(*batch).to(at::kDouble);
        const auto compute = [&](int64_t begin, int64_t end) {
          while (record.last_step != 0 && elastic.steps() >= record.last_step) usleep(200);
          const auto share = x.slice(0, begin, end);
          test::loss_of(wrapped.forward(share), share).backward();
        };
        if (!elastic.step(x.size(0), compute, [&] { wrapped.step(); })) break;
        wrapped.optimizer->zero_grad();
        for (const auto sample : *batch) ++whole.taken[epoch][sample];
        const auto loss = elastic.together([&] {
          const torch::NoGradGuard no_grad;
          const auto hidden = at::tanh(net->second(at::tanh(net->first(seen))));
          return test::loss_of(net->third(hidden), seen).item<double>();
        });
        record.complete[self].add({.step = elastic.steps(), .ranks = world.size(), .at = loss});
      }
    }
  }
  return "";
}

class ElasticJoinBatch : public ::testing::TestWithParam<test::Strategy> {};

TEST_P(ElasticJoinBatch, ELA05_ELA06_the_losses_are_those_of_ranks_that_do_not_change) {
  const SharedWhole plain;
  const auto sharding = GetParam().sharding;
  const auto undisturbed = [&](const World& world) { return train_whole(world, *plain, sharding); };
  for (const auto& ended : test::run_ranks(2, undisturbed)) EXPECT_EQ(ended.text, "");
  const SharedWhole changed;
  auto& record = changed->record;
  const auto body = [&](const World& world) { return train_whole(world, *changed, sharding); };
  const auto options = GetParam().options();
  record.last_step = 3;
  JoinJob job(4, body, options);
  ASSERT_TRUE(reach(record, {0, 1, 2, 3}, 3));
  job.signal(0, SIGKILL);
  record.last_step = 6;
  ASSERT_TRUE(reach(record, {1, 2, 3}, 6));
  const int first = job.add(body, options);
  ASSERT_TRUE(job.comes_to_knock(first));
  record.last_step = 9;
  ASSERT_TRUE(reach(record, {1, 2, 3, first}, 9));
  job.signal(1, SIGKILL);  // not next to each other, as each owns shards of the next one
  job.signal(3, SIGKILL);
  record.last_step = 12;
  ASSERT_TRUE(reach(record, {2, first}, 12));
  std::vector<int> members{2, first};
  for (int i = 0; i < 4; ++i) members.push_back(job.add(body, options));
  for (const int member : members) ASSERT_TRUE(job.comes_to_knock(member));
  record.last_step = 0;
  for (const int member : members) EXPECT_EQ(job.end_of(member).text, "") << "member " << member;
  EXPECT_EQ(test::sizes_of(record), std::vector<int>({4, 3, 4, 2, 6}));
  std::map<int64_t, double> expected;
  for (const auto& entry : plain->record.complete[0]) expected[entry.step] = entry.at;
  EXPECT_EQ(expected.size(), 5U * whole_epochs);
  int64_t last = 0;
  for (const auto& list : record.complete) {
    for (const auto& entry : list) {
      EXPECT_NEAR(entry.at, expected.at(entry.step), 1e-12) << "step " << entry.step;
      last = std::max(last, entry.step);
    }
  }
  EXPECT_EQ(last, 5 * whole_epochs);
  for (const auto& epoch : changed->taken) {
    for (const auto& times : epoch) EXPECT_EQ(times.load(), 1);
  }
}

INSTANTIATE_TEST_SUITE_P(EveryStrategy, ElasticJoinBatch, ::testing::ValuesIn(test::strategies_with_shares),
                         [](const auto& info) { return info.param.name(); });

}  // namespace
}  // namespace shoal::elastic_join_batch_test
