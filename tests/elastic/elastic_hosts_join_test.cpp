// Processes that come to an elastic job on several hosts: on hosts that have ranks, on hosts that have lost theirs, and
// on others.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/elastic/elastic_hosts_join.h"
#include "tests/elastic/elastic_local_judge.h"

namespace shoal::elastic_hosts_join_test {
namespace {

using test::bring;
using test::expect_good;
using test::ForkedHosts;
using test::fully_sharded;
using test::Kind;
using test::name_of;
using test::over;
using test::quick;
using test::reach;
using test::Sharding;
using test::Trained;

class ElasticHostsJoin : public test::OnHosts {};

const std::vector<Trained> by_host{
    {.sharding = Sharding::hybrid, .optimizer = "adamw", .micro_batches = 2},
    {.sharding = Sharding::hybrid, .optimizer = "adamw", .dtype = at::kBFloat16, .clip = 0.3},
    {.sharding = Sharding::zero1_by_host, .optimizer = "adamw"},
    {.sharding = Sharding::zero2_by_host, .optimizer = "adamw", .micro_batches = 2},
    {.sharding = Sharding::megatron_by_host, .optimizer = "adamw", .dtype = at::kBFloat16}};

// 4, 3, 4, 2 and 6 ranks: one is lost, one comes in its place, a whole host is lost, and another one comes with four.
void change_hosts(const std::string& transport, const Trained& trained = {}) {
  constexpr int epochs = 4;
  const test::SharedRecord record;
  record->last_step = 5;
  ForkedHosts hosts({2, 2, 0},
                    [&](const World& world) { return test::train(world, *record, epochs, {}, quick, trained); },
                    over(transport), {0, 1, 4});
  ASSERT_TRUE(reach(*record, {0, 1, 2, 3}, 5));
  hosts.signal(3, SIGKILL);
  record->last_step = 10;
  ASSERT_TRUE(reach(*record, {0, 1, 2}, 10));
  bring(hosts, {4});
  record->last_step = 15;
  ASSERT_TRUE(reach(*record, {0, 1, 2, 4}, 15)) << hosts.text_of(4).value_or("it waits");
  for (const int lost : {2, 4}) hosts.signal(lost, SIGKILL);
  record->last_step = 20;
  ASSERT_TRUE(reach(*record, {0, 1}, 20));
  bring(hosts, {5, 6, 7, 8});
  record->last_step = 0;
  expect_good(hosts.wait(60), {0, 1, 5, 6, 7, 8}, *record, epochs);
  EXPECT_EQ(test::sizes_of(*record), std::vector<int>({4, 3, 4, 2, 6}));
  EXPECT_EQ(test::judged(*record, epochs, transport == "tcp" || trained.sharding != Sharding::none, trained), "");
}

TEST_F(ElasticHostsJoin, ELA05_ELA06_4_3_4_2_and_6_ranks_in_one_run) {
  for (const std::string transport : {"tcp", "auto", "gloo"}) {
    SCOPED_TRACE(transport);
    change_hosts(transport);
  }
}

TEST_F(ElasticHostsJoin, ELA04_ELA05_ELA06_shards_of_each_host) {
  for (const auto& trained : by_host) {
    SCOPED_TRACE(name_of(trained));
    change_hosts("auto", trained);
  }
}

// With other optimizers in ElasticSecondJoin.
TEST_F(ElasticHostsJoin, ELA04_ELA05_ELA06_shards_over_all_hosts) {
  for (const auto& trained : fully_sharded) {
    if (trained.optimizer != "adamw") continue;
    const std::string transport = trained.clip > 0 ? "tcp" : "auto";
    SCOPED_TRACE(fmt::format("{} over {}", name_of(trained), transport));
    change_hosts(transport, trained);
  }
}

// Three ranks of two hosts, two, three and four of three hosts.
TEST_F(ElasticHostsJoin, ELA06_ELA12_local_updates) {
  const std::vector<test::LocalMethod> methods{{{.every = 3}},
                                               {{.every = 4, .outer = OuterNesterov{}, .fragments = 2, .delay = 2}}};
  for (const auto& how : methods) {
    SCOPED_TRACE(fmt::format("every {}", how.options.every));
    const test::SharedLocalRecord record;
    const auto comes_to = [&](const std::vector<int>& members, int64_t step) {
      return test::JoinJob::comes_true([&] {
        return std::all_of(members.begin(), members.end(), [&](int member) {
          const auto& list = record->begun[member];
          return list.count > 0 && list.entries[list.count - 1].step > step;
        });
      });
    };
    record->last_step = 3;
    ForkedHosts hosts({1, 2, 0}, [&](const World& world) { return train_locally(world, *record, how, {}, quick); },
                      over("tcp"), {0, 1, 1});
    ASSERT_TRUE(comes_to({0, 1, 2}, 3));
    hosts.signal(0, SIGKILL);
    record->last_step = 5;
    ASSERT_TRUE(comes_to({1, 2}, 5));
    bring(hosts, {3});
    record->last_step = 8;
    ASSERT_TRUE(comes_to({1, 2, 3}, 8)) << hosts.text_of(3).value_or("it waits");
    bring(hosts, {4});
    record->last_step = 0;
    const auto ended = hosts.wait(40);
    for (const int member : {1, 2, 3, 4}) {
      EXPECT_TRUE(WIFEXITED(ended[member].status)) << member;
      EXPECT_EQ(ended[member].text, "") << member;
    }
    EXPECT_GT(record->complete[4].count, 0) << "it has joined";
    const auto verdict = test::run_ranks(1, [&](const World&) { return test::LocalJudge(*record, how).verdict(); });
    EXPECT_EQ(verdict.front().text, "");
  }
}

enum class Fault { newcomer_is_killed, host_of_the_newcomer_is_lost, member_is_killed, host_of_members_is_lost };

// One trial: a newcomer comes to three hosts, and something is killed at a random moment from its start or its knock
// on.
void join_with(Fault fault, int trial, std::mt19937& random) {
  constexpr int epochs = 5;
  const auto& sharded = trial % 4 == 1 ? by_host : fully_sharded;
  const auto& trained = trial % 4 == 0 ? Trained() : sharded[random() % sharded.size()];
  const bool may_be_tcp = trained.sharding == Sharding::none || trained.sharding == Sharding::fsdp ||
                          trained.sharding == Sharding::megatron || trained.sharding == Sharding::zero1 ||
                          trained.sharding == Sharding::zero2;
  const std::string transport = may_be_tcp && random() % 2 == 0 ? "tcp" : "auto";
  const test::SharedRecord record;
  const auto body = [&](const World& world) {
    auto options = quick;
    options.on_change = [](const ElasticChange&) { usleep(2000); };
    return test::train(world, *record, epochs, {}, options, trained);
  };
  record->last_step = 3;
  // To a host of its own, or to one that has ranks.
  const bool apart = fault == Fault::host_of_the_newcomer_is_lost || random() % 2 == 0;
  auto patient = over(transport);
  patient.timeout_seconds = 10;  // a busy machine may keep a rank waiting for seconds
  ForkedHosts hosts({1, 1, 1, 0}, body, patient, apart ? std::vector<int>{0, 0, 0, 1} : std::vector<int>{1});
  std::vector<int> members{0, 1, 2};
  ASSERT_TRUE(reach(*record, members, 3));
  const bool near = random() % 2 == 0;
  near ? bring(hosts, {3}) : hosts.bring(3);
  record->last_step = 0;
  const auto pause = static_cast<useconds_t>(random() % (near ? 60'000 : 300'000));
  SCOPED_TRACE(fmt::format("trial {}: {} over {}, after {} us{}, {}", trial, name_of(trained), transport, pause,
                           near ? " from its knock" : "", apart ? "a host of its own" : "with rank 0"));
  usleep(pause);
  const int victim = static_cast<int>(random() % 3);
  if (fault == Fault::newcomer_is_killed) hosts.signal(3, SIGKILL);
  if (fault == Fault::host_of_the_newcomer_is_lost) hosts.kill_host(3);
  if (fault == Fault::member_is_killed) hosts.signal(victim, SIGKILL);
  if (fault == Fault::host_of_members_is_lost) hosts.kill_host(apart ? victim : 1 + victim % 2);
  if (fault == Fault::member_is_killed) std::erase(members, victim);
  if (fault == Fault::host_of_members_is_lost) std::erase(members, apart ? victim : 1 + victim % 2);
  const auto ended = hosts.wait(60);
  expect_good(ended, members, *record, epochs);
  const auto& text = ended[3].text;
  const bool member_is_lost = fault == Fault::member_is_killed || fault == Fault::host_of_members_is_lost;
  EXPECT_NE(text, "overdue");
  // It comes too late, or the others take the loss of a host for its fault, as they hear of that later.
  const bool may_be_refused = fault == Fault::host_of_members_is_lost && text.starts_with("error: ");
  EXPECT_TRUE(!member_is_lost || text.empty() || text.find("has ended") != std::string::npos || may_be_refused) << text;
  EXPECT_EQ(test::judged(*record, epochs, transport == "tcp" || trained.sharding != Sharding::none, trained), "");
}

void join_often_with(Fault fault) {
  const int seed = test::number_of("SHOAL_SEED", 1);
  std::mt19937 random(static_cast<unsigned>(seed));
  for (int trial = 0; trial < test::number_of("SHOAL_KILLS", 4) && !::testing::Test::HasFailure(); ++trial) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    join_with(fault, trial, random);
  }
}

TEST_F(ElasticHostsJoin, ELA06_a_newcomer_is_killed) {
  join_often_with(Fault::newcomer_is_killed);
}

TEST_F(ElasticHostsJoin, ELA06_the_host_of_a_newcomer_is_lost) {
  join_often_with(Fault::host_of_the_newcomer_is_lost);
}

TEST_F(ElasticHostsJoin, ELA06_a_member_is_killed_while_a_newcomer_joins) {
  join_often_with(Fault::member_is_killed);
}

TEST_F(ElasticHostsJoin, ELA06_a_host_of_members_is_lost_while_a_newcomer_joins) {
  join_often_with(Fault::host_of_members_is_lost);
}

// It has asked to join, and is admitted when nothing has been heard of it for longer than the time of silence.
TEST_F(ElasticHostsJoin, ELA06_a_newcomer_whose_host_has_fallen_silent_is_refused_once) {
  const test::SharedRecord record;
  std::atomic<int>& changes = record->first_epoch[test::most_members - 1];  // shared by all ranks
  const auto body = [&](const World& world) {
    auto options = quick;
    options.on_change = [&](const ElasticChange&) { ++changes; };
    return test::train(world, *record, 2, {}, options);
  };
  record->last_step = 3;
  ForkedHosts hosts({1, 1, 0}, body, over("tcp"), {0, 0, 1});
  ASSERT_TRUE(reach(*record, {0, 1}, 3));
  bring(hosts, {2});
  hosts.kill_host(2);
  usleep(2'500'000);
  record->last_step = 0;
  const auto ended = hosts.wait(40);
  expect_good(ended, {0, 1}, *record, 2);
  EXPECT_LE(changes, 2) << "of two ranks";
}

TEST_F(ElasticHostsJoin, ELA10_a_newcomer_that_waits_when_the_store_is_lost_ends_with_an_error) {
  const test::SharedRecord record;
  record->last_step = 3;
  ForkedHosts hosts({1, 1}, [&](const World& world) { return test::train(world, *record, 2, {}, quick); }, over("tcp"),
                    {1, 0});
  ASSERT_TRUE(reach(*record, {0, 1}, 3));
  bring(hosts, {2});
  hosts.lose_store();
  usleep(500'000);
  record->last_step = 0;
  for (const auto& ended : hosts.wait(40)) {
    EXPECT_TRUE(WIFEXITED(ended.status)) << ended.status;
    EXPECT_THAT(ended.text, testing::HasSubstr("which is lost"));
  }
}

}  // namespace
}  // namespace shoal::elastic_hosts_join_test
