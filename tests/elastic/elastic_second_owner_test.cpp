// Elastic jobs whose shards lie on several hosts: each shard has a second owner on another host, which makes the same
// updates.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "engine/sharded/second_copies.h"
#include "engine/sharded/second_owners.h"
#include "tests/elastic/elastic_second.h"

namespace shoal::elastic_second_owner_test {
namespace {

using test::all_train;
using test::die_on_hosts;
using test::ElasticSecondOwner;
using test::ForkedHosts;
using test::fully_sharded;
using test::Kind;
using test::Moment;
using test::name_of;
using test::over;
using test::quick;
using test::rarely_sharded;
using test::Trained;

TEST(SecondOwners, ELA04_the_second_owner_is_on_the_next_host) {
  EXPECT_EQ(choose_second_owners({0, 1, 2}), (std::vector<int>{1, 2, 0}));
  EXPECT_EQ(choose_second_owners({0, 0, 1, 1}), (std::vector<int>{2, 3, 0, 1}));
  EXPECT_EQ(choose_second_owners({0, 1, 1, 1}), (std::vector<int>{1, 0, 0, 0}));
  EXPECT_EQ(choose_second_owners({0, 1, 0, 1, 2}), (std::vector<int>{1, 4, 3, 4, 0}));
  EXPECT_EQ(choose_second_owners({0, 0, 0}), (std::vector<int>{1, 2, 0}));  // of one host
}

// Sums of a rank that is alone, and the second owner of them, too.
struct Copied {
  explicit Copied(const Group& group)
      : reducer({{"a", a}, {"b", b}}, group, {.leave_grad = false},
                std::make_unique<ReduceToOwner>(group, BucketCaps{}, std::vector<int>{0, 0})),
        copies(std::make_shared<SecondCopies>(reducer)) {}
  at::Tensor a = at::ones({3}).set_requires_grad(true);
  at::Tensor b = at::ones({5}).set_requires_grad(true);
  Reducer reducer;
  std::shared_ptr<SecondCopies> copies;
};

TEST(SecondOwners, ELA04_copies_of_sums_are_made_anew_each_time_that_buckets_are) {
  const auto ended = test::run_ranks(1, [](const World& world) -> std::string {
    Copied copied(world.group());
    for (const auto& order : {std::vector<size_t>{0, 1}, {1, 0}}) {
      copied.reducer.resume_from(BucketOrder::Learnt{order, 0});
      copied.reducer.expect_backward();
      if (copied.copies->of_these_buckets()) return "copies of former buckets";
      copied.copies->follow({}, 0, {});
      if (!copied.copies->of_these_buckets()) return "copies were not made anew";
    }
    return "";
  });
  EXPECT_EQ(ended[0].text, "");
}

TEST(SecondOwners, ELA04_copies_of_sums_live_as_long_as_a_sum_that_they_follow) {
  const auto ended = test::run_ranks(1, [](const World& world) -> std::string {
    Copied copied(world.group());
    const std::weak_ptr<SecondCopies> seen = copied.copies;
    const auto sum = copied.copies->follow({}, 0, {});
    copied.copies.reset();
    return seen.expired() ? "they have gone" : "";
  });
  EXPECT_EQ(ended[0].text, "");
}

std::vector<Trained> all_sharded() {
  auto list = fully_sharded;
  list.insert(list.end(), rarely_sharded.begin(), rarely_sharded.end());
  return list;
}

TEST_F(ElasticSecondOwner, ELA01_ELA02_ELA04_nobody_ends) {
  std::map<test::Sharding, int> trainings;  // so far: each way to shard is tried in every division
  for (const auto& trained : all_sharded()) {
    SCOPED_TRACE(name_of(trained));
    const bool shared = trainings[trained.sharding]++ % 2 == 0;
    die_on_hosts(shared ? Kind{{2, 2}, "auto"} : Kind{{1, 1, 1}, "tcp"}, {}, trained);
    die_on_hosts(shared ? Kind{{3}, "tcp"} : Kind{{1, 2}, "auto"}, {}, trained);
  }
}

TEST_F(ElasticSecondOwner, ELA01_ELA02_ELA04_a_rank_ends_at_each_moment_of_a_step) {
  test::die_at_each_moment(fully_sharded);
}

TEST_F(ElasticSecondOwner, ELA01_ELA02_ELA04_a_host_with_one_rank_ends_at_each_moment_of_a_step) {
  int number = 0;
  for (const auto moment : {Moment::before_forward, Moment::after_forward, Moment::in_backward, Moment::before_commit,
                            Moment::before_update, Moment::spoilt_update, Moment::after_update, Moment::between_steps,
                            Moment::evaluation}) {
    const auto& trained = fully_sharded[static_cast<size_t>(number) % fully_sharded.size()];
    SCOPED_TRACE(fmt::format("{}, moment {}", name_of(trained), static_cast<int>(moment)));
    die_on_hosts({{1, 1, 1}, number % 2 == 0 ? "auto" : "tcp"}, {{number % 3, moment, 4}}, trained);
    ++number;
  }
}

TEST_F(ElasticSecondOwner, ELA01_ELA02_ELA04_ranks_end_one_after_the_other_until_one_is_left) {
  std::map<test::Sharding, int> trainings;  // so far: each way to shard is tried in every division
  for (const auto& trained : all_sharded()) {
    SCOPED_TRACE(name_of(trained));
    const int left_out = trainings[trained.sharding]++ % 3;
    if (left_out != 0) {
      die_on_hosts({{1, 1, 1}, "auto"}, {{1, Moment::in_backward, 3}, {0, Moment::spoilt_update, 6}}, trained);
    }
    if (left_out != 1) {  // those that are left are on one host, where ranks share memory
      die_on_hosts({{2, 2}, "auto"},
                   {{2, Moment::before_commit, 3}, {3, Moment::in_backward, 6}, {0, Moment::in_update, 9}}, trained);
    }
    if (left_out != 2) {
      die_on_hosts({{2, 1}, "tcp"}, {{2, Moment::before_update, 3}, {1, Moment::in_backward, 6}}, trained);
    }
  }
}

// Where there is one host, its ranks have one copy of the model between them.
TEST_F(ElasticSecondOwner, ELA01_ELA04_hybrid_shard_on_one_host_over_sockets) {
  auto hybrid = fully_sharded[0];
  hybrid.sharding = test::Sharding::hybrid;
  die_on_hosts({{3}, "tcp"}, {{1, Moment::before_forward, 4}}, hybrid);
}

TEST_F(ElasticSecondOwner, ELA02_ELA04_ranks_whose_shards_are_elsewhere_end_at_once) {
  for (const auto& trained : fully_sharded) {
    SCOPED_TRACE(name_of(trained));
    die_on_hosts({{1, 1, 1, 1}, "auto"}, {{0, Moment::before_update, 4}, {2, Moment::spoilt_update, 4}}, trained);
    die_on_hosts({{2, 2}, "auto"}, {{0, Moment::in_backward, 4}, {3, Moment::in_backward, 4}}, trained);
  }
}

TEST_F(ElasticSecondOwner, ELA01_ranks_end_while_others_recover) {
  for (const auto moment : {Moment::on_notice, Moment::in_division, Moment::after_recovery}) {
    SCOPED_TRACE(std::to_string(static_cast<int>(moment)));
    die_on_hosts({{1, 1, 1, 1}, "auto"}, {{1, Moment::in_backward, 4}, {3, moment, 4}}, fully_sharded[0]);
    die_on_hosts({{2, 2, 2}, "auto"}, {{4, Moment::before_forward, 4}, {1, moment, 4}}, fully_sharded[1]);
  }
}

TEST_F(ElasticSecondOwner, ELA10_the_loss_of_both_owners_names_the_shards) {
  const test::SharedRecord record;
  record->last_step = 3;
  ForkedHosts hosts(
      {1, 1, 1, 1}, [&](const World& world) { return test::train(world, *record, 60, {}, quick, fully_sharded[0]); },
      over("tcp"));
  ASSERT_TRUE(all_train(*record, 4));
  while (record->begun[0].empty() || record->begun[3].empty()) usleep(200);
  hosts.signal(1, SIGKILL);
  hosts.signal(2, SIGKILL);
  usleep(200'000);
  record->last_step = 0;
  const auto ended = hosts.wait(20);
  for (const int rank : {0, 3}) {
    EXPECT_THAT(
        ended[static_cast<size_t>(rank)].text,
        testing::AllOf(testing::HasSubstr("both ranks that had shards of first."),
                       testing::HasSubstr("more parameters have ended"), testing::HasSubstr("last checkpoint")));
  }
}

// Ranks that own the same are never killed at once; a later one is killed when the shards may or may not be divided
// anew.
TEST_F(ElasticSecondOwner, ELA01_ELA02_ELA04_ranks_and_hosts_end_at_random_moments) {
  const int seed = test::number_of("SHOAL_SEED", 1);
  const int trials = test::number_of("SHOAL_KILLS", 8);
  constexpr int epochs = 3;
  const std::vector<Kind> kinds{
      {{1, 1, 1}, "auto"}, {{1, 1, 1, 1}, "tcp"}, {{2, 2}, "auto"}, {{2, 2, 2}, "auto"}, {{1, 2}, "auto"}};
  std::mt19937 random(static_cast<unsigned>(seed));
  test::Kills kills;
  for (int trial = 0; trial < trials && !HasFailure(); ++trial) {
    const auto turn = static_cast<size_t>(trial + trials * (seed - 1));  // few trials have all of both
    const auto& kind = kinds[turn % kinds.size()];
    const auto& trained = fully_sharded[turn % fully_sharded.size()];
    std::vector<int> host_of;
    for (size_t host = 0; host < kind.hosts.size(); ++host)
      host_of.insert(host_of.end(), static_cast<size_t>(kind.hosts[host]), static_cast<int>(host));
    const auto owners = choose_second_owners(host_of);
    const bool whole = kind.hosts.size() > 2 && random() % 2 == 0;
    const auto host = random() % kind.hosts.size();
    const int first = static_cast<int>(random() % static_cast<unsigned>(kind.ranks()));
    auto victims = whole ? kind.ranks_of(host) : std::vector<int>{first};
    const auto apart = [&](int rank) {
      return std::none_of(victims.begin(), victims.end(), [&](int victim) {
        return victim == rank || owners[static_cast<size_t>(victim)] == rank ||
               owners[static_cast<size_t>(rank)] == victim;
      });
    };
    std::vector<int> others;
    for (int rank = 0; rank < kind.ranks(); ++rank) {
      if (apart(rank)) others.push_back(rank);
    }
    const int second = others.empty() || random() % 2 == 0 ? -1 : others[random() % others.size()];
    const auto pause = static_cast<useconds_t>(random() % 80'000);
    SCOPED_TRACE(fmt::format("seed {}, trial {}: {}, rank(s) {} of hosts with {} over {}, after {} us, second {}", seed,
                             trial, name_of(trained), fmt::join(victims, ", "), fmt::join(kind.hosts, ", "),
                             kind.transport, pause, second));
    const test::SharedRecord record;
    ForkedHosts hosts(
        kind.hosts, [&](const World& world) { return test::train(world, *record, epochs, {}, quick, trained); },
        over(kind.transport));
    EXPECT_TRUE(all_train(*record, hosts.ranks()));
    usleep(pause);
    if (second >= 0) {
      hosts.signal(second, SIGKILL);
      usleep(static_cast<useconds_t>(random() % 50'000));  // also while shards are divided anew
      victims.push_back(second);
    }
    whole ? hosts.kill_host(static_cast<int>(host)) : hosts.signal(first, SIGKILL);
    const auto ended = hosts.wait(40);
    test::check(ended, victims, *record, epochs, true, trained);
    kills.count(ended);
  }
  fmt::print("{}\n", kills.text());
  EXPECT_GT(kills.all, 0);
}

}  // namespace
}  // namespace shoal::elastic_second_owner_test
