// Elastic jobs on several hosts, each of which has all shards: a host is lost, ranks end in each moment of a step, and
// hosts are left with different numbers of ranks.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/membership/generations.h"
#include "tests/elastic/elastic_hosts.h"
#include "tests/support/refusal.h"

namespace shoal::elastic_hybrid_test {
namespace {

using test::all_train;
using test::ForkedHosts;
using test::Kind;
using test::Moment;
using test::name_of;
using test::over;
using test::quick;
using test::Sharding;
using test::Trained;

class ElasticHybrid : public test::OnHosts {};

const std::vector<Trained> hybrids{
    {.sharding = Sharding::hybrid, .optimizer = "adamw", .micro_batches = 2},
    {.sharding = Sharding::hybrid, .optimizer = "adamw", .dtype = at::kBFloat16, .clip = 0.3},
    {.sharding = Sharding::hybrid, .optimizer = "sgd", .dtype = at::kHalf},
    {.sharding = Sharding::hybrid, .optimizer = "lamb"},
    {.sharding = Sharding::zero1_by_host, .optimizer = "adamw", .micro_batches = 2},
    {.sharding = Sharding::zero2_by_host, .optimizer = "adamw", .micro_batches = 2},
    {.sharding = Sharding::zero2_by_host, .optimizer = "sgd"},
    {.sharding = Sharding::megatron_by_host, .optimizer = "adamw", .micro_batches = 2},
    {.sharding = Sharding::megatron_by_host, .optimizer = "adamw", .dtype = at::kBFloat16, .clip = 0.3},
    {.sharding = Sharding::megatron_by_host, .optimizer = "sgd", .dtype = at::kHalf, .overlap = false}};

TEST_F(ElasticHybrid, ELA01_ELA02_ELA04_without_deaths_the_state_is_that_of_one_process) {
  for (const auto& trained : hybrids) {
    SCOPED_TRACE(name_of(trained));
    test::die_on_hosts({{2, 2}, "auto"}, {}, trained);
    if (trained.sharding != Sharding::zero1_by_host) test::die_on_hosts({{1, 2}, "auto"}, {}, trained);
  }
}

TEST_F(ElasticHybrid, ELA01_ELA02_ELA04_a_rank_ends_at_each_moment_of_a_step) {
  test::die_at_each_moment(hybrids);
}

// The group of a host is that of all ranks there.
TEST_F(ElasticHybrid, ELA01_ELA02_on_one_host) {
  for (const auto& trained : hybrids) {
    SCOPED_TRACE(name_of(trained));
    test::die_on_hosts({{3}, "auto"}, {{0, Moment::spoilt_update, 4}, {2, Moment::in_backward, 7}}, trained);
  }
}

TEST_F(ElasticHybrid, ELA01_ranks_end_while_others_recover) {
  for (const auto moment : {Moment::on_notice, Moment::after_recovery}) {
    SCOPED_TRACE(std::to_string(static_cast<int>(moment)));
    test::die_on_hosts({{2, 2}, "auto"}, {{0, Moment::in_backward, 4}, {2, moment, 4}}, hybrids[0]);
    test::die_on_hosts({{3, 2}, "auto"}, {{3, Moment::in_last_chunk, 4}, {1, moment, 4}}, hybrids[1]);
  }
}

// By then it has noticed that the other one has ended.
TEST_F(ElasticHybrid, ELA02_a_rank_that_is_alone_on_its_host_ends_its_update_after_the_death_of_another_host) {
  for (const auto& trained : hybrids) {
    SCOPED_TRACE(name_of(trained));
    test::die_on_hosts({{1, 1, 1}, "auto"}, {{2, Moment::before_update, 4}, {1, Moment::before_update, 4, 0}}, trained);
  }
}

// The first one ends in its update and the second one finishes it, until it ends in that, too.
TEST_F(ElasticHybrid, ELA02_heirs_end_while_they_finish_an_update) {
  for (const auto& trained : hybrids) {
    SCOPED_TRACE(name_of(trained));
    test::die_on_hosts({{3, 3}, "auto"}, {{3, Moment::spoilt_update, 4}, {4, Moment::finishing, 4}}, trained);
  }
}

// Until one host is left, and one rank on it.
TEST_F(ElasticHybrid, ELA01_ELA02_ELA04_hosts_shrink_and_end_until_one_rank_is_left) {
  for (const auto& trained : hybrids) {
    SCOPED_TRACE(name_of(trained));
    test::die_on_hosts({{2, 2}, "auto"},
                       {{1, Moment::in_update, 3}, {0, Moment::before_forward, 6}, {3, Moment::in_backward, 9}},
                       trained);
  }
}

// Of three ranks of a host, 1 fails in the meeting before the commit, which 0 comes through, and 2 may end after it.
struct Case {
  bool passes;  // 0 asks before 1 does
  bool dies;    // 2 ends
};

struct Asked {
  std::atomic<int> answer;  // 1: it passes, 2: it does not
  std::atomic<int> ready;
};

std::string commit_and_step(const World& world, Asked& asked, const Case& one) {
  alarm(30);
  const Generations generations(world);
  const auto net = std::make_shared<test::Net>();
  const test::Trained trained{Sharding::zero1, "adamw"};
  const auto wrapped = test::wrap_as(trained, net, world.group());
  auto& oss = *wrapped.oss();
  ElasticAccess::guard(oss);
  torch::manual_seed(3);
  const auto x = test::inputs_of({1, 2, 3});
  wrapped.backward(test::loss_of(wrapped.forward(x), x));
  ElasticAccess::map_on_host(oss, ElasticAccess::prepare_commit(oss));
  const int self = world.rank();
  ++asked.ready;
  while (asked.ready < 3) usleep(100);
  if (one.dies && self == 2) std::raise(SIGKILL);
  const auto decide = [&](bool passes) {
    int none = 0;
    asked.answer.compare_exchange_strong(none, passes ? 1 : 2);
    return asked.answer == 1;
  };
  const bool came = self != 1;
  if (came != one.passes) {
    while (asked.answer == 0) usleep(100);
  }
  const bool passed = ElasticAccess::commit_over_hosts(oss, came, decide);
  if (passed != one.passes) return "another answer";
  if (!passed) return test::refusal([&] { oss.step(); }).empty() ? "stepped" : "";
  oss.step();
  const auto alone = std::make_shared<test::Net>();
  torch::optim::AdamW optimizer(alone->parameters(), torch::optim::AdamWOptions(test::learning_rate));
  torch::manual_seed(3);
  test::loss_of(alone->forward(x), x).backward();
  for (size_t i = 0; i < alone->parameters().size(); ++i) {
    const auto part = alone->parameters()[i].grad() * (1.0 / 3);
    alone->parameters()[i].mutable_grad() = part + part + part;
  }
  optimizer.step();
  for (size_t i = 0; i < alone->parameters().size(); ++i) {
    if (!at::equal(alone->parameters()[i], net->parameters()[i])) return fmt::format("parameter {} differs", i);
  }
  return "";
}

TEST(ElasticCommit, ELA02_a_commit_over_hosts_is_the_first_answer_for_all_who_come_and_all_who_fail) {
  for (const auto& one : {Case{true, false}, Case{false, false}, Case{true, true}, Case{false, true}}) {
    SCOPED_TRACE(fmt::format("passes {}, dies {}", one.passes, one.dies));
    const test::InSharedMemory<Asked> asked;
    const auto ended = test::run_ranks(3, [&](const World& world) { return commit_and_step(world, *asked, one); });
    for (const int rank : {0, 1}) EXPECT_EQ(ended[rank].text, "") << "rank " << rank;
    EXPECT_EQ(WIFSIGNALED(ended[2].status), one.dies);
  }
}

TEST_F(ElasticHybrid, ELA10_the_loss_of_the_store_is_that_of_the_job) {
  const test::SharedRecord record;
  record->last_step = 3;
  ForkedHosts hosts(
      {2, 2}, [&](const World& world) { return test::train(world, *record, 60, {}, quick, hybrids[0]); }, over("auto"));
  ASSERT_TRUE(all_train(*record, 4));
  hosts.lose_store();
  record->last_step = 0;
  for (const auto& one : hosts.wait(20)) {
    EXPECT_THAT(one.text, testing::AllOf(testing::HasSubstr("through its store, which is lost"),
                                         testing::HasSubstr("last checkpoint"),
                                         testing::HasSubstr("no shard is lost: each host that is left has all")));
  }
}

TEST_F(ElasticHybrid, ELA01_ELA02_ELA04_ranks_and_hosts_end_at_random_moments) {
  // With DDP, OSS needs equally many ranks on each host.
  const auto may_train = [](const Kind& kind, const Trained& trained) {
    return kind.hosts[0] == kind.hosts[1] || trained.sharding != Sharding::zero1_by_host;
  };
  test::kill_on_hosts_at_random(
      {{{2, 2}, "auto"}, {{3, 3}, "auto"}, {{1, 2}, "auto"}, {{2, 2, 2}, "auto"}, {{1, 1, 1}, "auto"}}, hybrids,
      may_train);
}

TEST_F(ElasticHybrid, FSDP01_unequal_hosts_must_begin_with_the_values_of_rank_0) {
  ForkedHosts hosts({2, 1}, [](const World& world) {
    return test::refusal([&] {
      FullyShardedDataParallelOptions options{.sharding_strategy = ShardingStrategy::hybrid_shard};
      options.sync_module_states = false;
      auto net = std::make_shared<test::Net>();
      const FullyShardedDataParallel parallel(net, world.group(), options);
    });
  });
  for (const auto& one : hosts.wait(20))
    EXPECT_THAT(one.text, testing::HasSubstr("sync_module_states is off, and hosts"));
}

// Each host would train a model of its own, and their gradients would be added after a death.
TEST_F(ElasticHybrid, ELA01_a_wrapper_over_the_ranks_of_a_host_is_refused) {
  ForkedHosts hosts({2, 2}, [](const World& world) {
    const auto net = std::make_shared<test::Net>();
    const auto wrapped = test::wrap_as(hybrids[6], net, world.group().by_host());
    return test::refusal([&] { wrapped.elastic(world, quick); });
  });
  for (const auto& one : hosts.wait(20)) EXPECT_THAT(one.text, testing::HasSubstr("group is not the world's"));
}

// The rank that is alone on its host could go on, and must not.
TEST_F(ElasticHybrid, ELA01_shards_over_sockets_are_refused_on_all_ranks) {
  for (const auto sharding : {Sharding::zero2_by_host, Sharding::megatron_by_host}) {
    ForkedHosts hosts(
        {1, 2},
        [&](const World& world) {
          const auto net = std::make_shared<test::Net>();
          const auto wrapped = test::wrap_as({.sharding = sharding}, net, world.group());
          return test::refusal([&] { wrapped.elastic(world, quick); });
        },
        over("tcp"));
    for (const auto& one : hosts.wait(20)) EXPECT_THAT(one.text, testing::HasSubstr("(of all hosts)"));
  }
}

// A step that all ranks refuse alike is no decision.
TEST_F(ElasticHybrid, ELA02_a_program_goes_on_after_an_error_of_the_meeting) {
  ForkedHosts hosts({2, 2}, [](const World& world) -> std::string {
    alarm(30);
    const auto net = std::make_shared<test::Net>();
    const auto wrapped = test::wrap_as(hybrids[0], net, world.group());
    DistributedSampler sampler(64, world.group());
    const auto elastic = wrapped.elastic(world, sampler, quick);
    elastic->in_epoch();
    const auto x = test::inputs_of({1, 2});
    const auto step = [&](int64_t samples) {
      const bool complete = elastic->step(
          samples, [&] { test::loss_of(wrapped.forward(x), x).backward(); }, [&] { wrapped.step(); });
      wrapped.optimizer->zero_grad();
      return complete;
    };
    step(2);
    const auto said = test::refusal([&] { step(world.rank() == 3 ? 1 : 2); });
    wrapped.optimizer->zero_grad();
    if (!step(2) || !step(2)) return "a step was not complete";
    return fmt::format("{}, {} steps, generation {}", said, elastic->steps(), elastic->generation());
  });
  for (const auto& one : hosts.wait(30)) {
    EXPECT_THAT(one.text, testing::AllOf(testing::HasSubstr("ranks have 1 to 2 samples in one step"),
                                         testing::HasSubstr("3 steps, generation 1")));
  }
}

}  // namespace
}  // namespace shoal::elastic_hybrid_test
