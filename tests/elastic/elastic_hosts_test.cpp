// Elastic jobs on several hosts: ranks and whole hosts that are killed, and hosts that must not go on.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <tuple>

#include "tests/elastic/elastic_hosts.h"
#include "tests/elastic/elastic_local_judge.h"
#include "tests/support/refusal.h"
#include "tests/support/temp_folder.h"

namespace shoal::elastic_hosts_test {
namespace {

using test::all_train;
using test::Death;
using test::ForkedHosts;
using test::Kind;
using test::Moment;
using test::over;
using test::quick;
using testing::HasSubstr;

class ElasticHosts : public test::OnHosts {};

const std::vector<Kind> kinds{{{2, 2}, "auto"}, {{2, 2}, "tcp"}, {{1, 3}, "tcp"}, {{1, 1, 1}, "tcp"}, {{2, 2}, "gloo"}};

void die_at(const Kind& kind, const std::vector<Death>& deaths) {
  const test::SharedRecord record;
  ForkedHosts hosts(
      kind.hosts, [&](const World& world) { return test::train(world, *record, 1, deaths, quick); },
      over(kind.transport));
  const auto ended = hosts.wait(40);
  std::vector<int> victims;
  for (const auto& death : deaths) victims.push_back(death.rank);
  check(ended, victims, *record, 1, kind.transport == "tcp");
  for (const auto& death : deaths) {
    if (death.moment == Moment::on_notice) continue;  // of another death, which may come too late
    EXPECT_TRUE(WIFSIGNALED(ended[static_cast<size_t>(death.rank)].status)) << death.rank << " did not come to its end";
  }
}

TEST_F(ElasticHosts, ELA01_ELA02_a_rank_ends_at_each_moment_of_a_step) {
  // In the first three moments ranks wait for each other, over their transport; the others are divided among
  // transports.
  const std::vector<Moment> alike{Moment::before_forward, Moment::before_update, Moment::between_steps,
                                  Moment::evaluation};
  int number = 0;
  size_t next = 3;
  for (const auto& kind : kinds) {
    std::vector<Moment> moments{Moment::in_backward, Moment::before_commit, Moment::after_update};
    for (size_t i = 0; i < 2; ++i) moments.push_back(alike[(next + i) % alike.size()]);
    ++next;
    for (const auto moment : moments) {
      const int victim = ++number % kind.ranks();
      SCOPED_TRACE(fmt::format("{} hosts over {}, moment {}, rank {}", kind.hosts.size(), kind.transport,
                               static_cast<int>(moment), victim));
      die_at(kind, {{victim, moment, moment == Moment::evaluation ? 1 : 3 + number % 3}});
    }
  }
}

TEST_F(ElasticHosts, ELA01_ranks_end_while_others_recover) {
  for (const auto& kind : {kinds[0], kinds[1]}) {
    for (const auto moment : {Moment::on_notice, Moment::after_recovery}) {
      SCOPED_TRACE(kind.transport + " " + std::to_string(static_cast<int>(moment)));
      die_at(kind, {{0, Moment::in_backward, 4}, {2, moment, 4}});
      die_at(kind, {{3, Moment::before_commit, 4}, {1, moment, 4}});
    }
  }
}

void lose_host(const Kind& kind, size_t host, int pause_us) {
  const test::SharedRecord record;
  ForkedHosts hosts(
      kind.hosts, [&](const World& world) { return test::train(world, *record, 3, {}, quick); }, over(kind.transport));
  EXPECT_TRUE(all_train(*record, hosts.ranks()));
  usleep(static_cast<useconds_t>(pause_us));
  hosts.kill_host(static_cast<int>(host));
  const auto ended = hosts.wait(40);
  check(ended, kind.ranks_of(host), *record, 3, kind.transport == "tcp");
  for (const int rank : kind.ranks_of(host)) EXPECT_TRUE(WIFSIGNALED(ended[static_cast<size_t>(rank)].status)) << rank;
}

TEST_F(ElasticHosts, ELA01_ELA02_ELA04_a_host_is_lost_with_all_its_ranks) {
  for (const auto& [kind, host] : {std::pair{Kind{{2, 2}, "auto"}, 1},
                                   {Kind{{2, 2, 2}, "auto"}, 0},
                                   {Kind{{2, 2, 2}, "tcp"}, 1},
                                   {Kind{{2, 1}, "tcp"}, 1},
                                   {Kind{{1, 1, 1}, "tcp"}, 0}}) {
    for (const int pause : {0, 30'000}) {
      SCOPED_TRACE(fmt::format("host {} of {} over {}, after {} us", host, kind.hosts.size(), kind.transport, pause));
      lose_host(kind, static_cast<size_t>(host), pause);
    }
  }
}

// Ranks that are cut off could go on by themselves, if a smaller part went on as well.
TEST_F(ElasticHosts, ELA10_a_smaller_part_does_not_go_on_without_a_host_of_which_it_hears_nothing) {
  const test::SharedRecord record;
  ForkedHosts hosts(
      {3, 1}, [&](const World& world) { return test::train(world, *record, 2, {}, quick); }, over("tcp"));
  ASSERT_TRUE(all_train(*record, 4));
  hosts.kill_host(0);
  EXPECT_THAT(hosts.wait(40)[3].text, HasSubstr("nothing is heard of the hosts of rank(s) 0, 1, 2"));
}

constexpr int endless = 60;  // epochs, more than there is time for

// A folder of checkpoints, for errors that name the last one.
ElasticOptions saving_to(const test::TempFolder& folder) {
  std::filesystem::create_directory(folder.path() / "step-7");
  std::ofstream(folder.path() / "latest") << "step-7\n";
  auto options = quick;
  options.checkpoints = folder.path();
  return options;
}

testing::Matcher<std::string> names_checkpoint_in(const test::TempFolder& folder) {
  return HasSubstr("(the last checkpoint is " + (folder.path() / "step-7").string() + ")");
}

TEST_F(ElasticHosts, ELA10_the_loss_of_the_store_is_that_of_the_job) {
  const test::TempFolder folder;
  const auto options = saving_to(folder);
  for (const auto& [transport, sharding, shards] :
       {std::tuple("auto", test::Sharding::none, "no shard is lost: each rank that is left has all"),
        {"auto", test::Sharding::hybrid, "no shard is lost: each host that is left has all"},
        {"tcp", test::Sharding::zero2, "each shard was on two ranks, and is lost where both have ended"}}) {
    const test::Trained trained{sharding};
    SCOPED_TRACE(name_of(trained) + " over " + transport);
    const test::SharedRecord record;
    record->last_step = 3;
    ForkedHosts hosts(
        {2, 2}, [&](const World& world) { return test::train(world, *record, endless, {}, options, trained); },
        over(transport));
    ASSERT_TRUE(all_train(*record, 4));
    hosts.lose_store();
    record->last_step = 0;
    for (const auto& one : hosts.wait(20)) {
      EXPECT_THAT(one.text, testing::AllOf(HasSubstr("through its store, which is lost"), HasSubstr(shards),
                                           names_checkpoint_in(folder)));
    }
  }
}

TEST_F(ElasticHosts, ELA10_the_loss_of_both_owners_names_the_shards_and_the_last_checkpoint) {
  const test::TempFolder folder;
  const auto options = saving_to(folder);
  for (const size_t kind : {1, 5, 6, 7}) {
    const auto& trained = test::fully_sharded[kind];
    SCOPED_TRACE(name_of(trained));
    const test::SharedRecord record;
    record->last_step = 3;
    ForkedHosts hosts(
        {1, 1, 1, 1}, [&](const World& world) { return test::train(world, *record, endless, {}, options, trained); },
        over("tcp"));
    ASSERT_TRUE(all_train(*record, 4));
    while (record->begun[0].empty() || record->begun[3].empty()) usleep(200);
    hosts.signal(1, SIGKILL);
    hosts.signal(2, SIGKILL);
    usleep(200'000);
    record->last_step = 0;
    const auto ended = hosts.wait(20);
    for (const size_t rank : {0, 3}) {
      EXPECT_THAT(ended[rank].text,
                  testing::AllOf(HasSubstr("both ranks that had shards of "), HasSubstr("have ended"),
                                 HasSubstr("is lost where both have ended"), names_checkpoint_in(folder)));
    }
  }
}

TEST_F(ElasticHosts, ELA01_a_rank_that_is_stopped_is_waited_for_while_others_of_its_host_live) {
  const test::SharedRecord record;
  ForkedHosts hosts(
      {2, 2}, [&](const World& world) { return test::train(world, *record, 1, {}, quick); }, over("auto"));
  ASSERT_TRUE(all_train(*record, 4));
  hosts.signal(3, SIGSTOP);
  usleep(2'500'000);
  hosts.signal(3, SIGCONT);
  check(hosts.wait(40), {}, *record, 1, false);
}

// A host that stands still, or is cut off, for too long finds that the others have gone on.
TEST_F(ElasticHosts, ELA08_a_host_that_was_silent_too_long_ends_with_an_error) {
  const test::SharedRecord record;
  ForkedHosts hosts(
      {2, 1}, [&](const World& world) { return test::train(world, *record, 2, {}, quick); }, over("tcp"));
  ASSERT_TRUE(all_train(*record, 3));
  hosts.signal(2, SIGSTOP);
  const double deadline = test::now() + 20;
  while (record->evaluations[0] == 0 && test::now() < deadline) usleep(1000);
  hosts.signal(2, SIGCONT);
  auto ended = hosts.wait(40);
  EXPECT_THAT(ended[2].text, HasSubstr("the other ranks of this elastic job go on without this one"));
  ended.pop_back();
  check(ended, {}, *record, 2);
}

// Those that have gone on may have admitted others before they ended. Nobody comes for whom it could wait.
TEST_F(ElasticHosts, ELA08_a_host_that_was_silent_until_the_others_had_ended_names_them_at_once) {
  const test::SharedRecord record;
  record->last_step = 3;
  auto options = over("tcp");
  options.timeout_seconds = 60;
  ForkedHosts hosts(
      {1, 1, 1}, [&](const World& world) { return test::train(world, *record, endless, {}, quick); }, options);
  const auto until = [](const std::function<bool()>& condition) {
    const double deadline = test::now() + 20;
    while (!condition() && test::now() < deadline) usleep(1000);
    return condition();
  };
  const auto has_step_of = [&](int rank, int ranks) {
    const auto& steps = record->complete[rank];
    return std::any_of(steps.begin(), steps.end(), [&](const auto& step) { return step.ranks == ranks; });
  };
  ASSERT_TRUE(until([&] { return has_step_of(2, 3); }));
  usleep(100'000);  // it waits in its next step by now
  hosts.signal(2, SIGSTOP);
  usleep(100'000);
  record->last_step = 0;
  ASSERT_TRUE(until([&] { return has_step_of(0, 2); }));
  for (const int rank : {0, 1}) hosts.signal(rank, SIGKILL);
  usleep(100'000);
  record->last_step = 3;
  hosts.signal(2, SIGCONT);
  usleep(1'000'000);  // it has heard all that they have shown, and of their end, as their launchers say
  record->last_step = 0;
  EXPECT_THAT(hosts.wait(30)[2].text,
              HasSubstr("rank(s) 0, 1 of the first generation, of which nothing was heard for a time, have ended"));
}

TEST_F(ElasticHosts, ELA01_ELA02_ranks_and_hosts_end_at_random_moments) {
  test::kill_on_hosts_at_random(
      {{{2, 2}, "tcp"}, {{2, 2}, "auto"}, {{1, 2}, "tcp"}, {{2, 2, 2}, "auto"}, {{1, 1, 2}, "tcp"}}, {test::Trained()},
      [](const Kind&, const test::Trained&) { return true; });
}

TEST_F(ElasticHosts, ELA12_local_updates_outlive_ranks_and_hosts) {
  const std::vector<test::LocalMethod> methods{{{.every = 3}},
                                               {{.every = 4, .outer = OuterNesterov{}, .fragments = 2, .delay = 2}}};
  for (const auto& how : methods) {
    for (const std::string transport : {"auto", "tcp"}) {
      SCOPED_TRACE(fmt::format("every {} over {}", how.options.every, transport));
      const test::SharedLocalRecord record;
      const std::vector<Death> deaths{
          {0, Moment::after_update, 4}, {2, Moment::in_backward, 4}, {3, Moment::in_backward, 4}};
      ForkedHosts hosts(
          {2, 2, 2}, [&](const World& world) { return train_locally(world, *record, how, deaths, quick); },
          over(transport));
      const auto ended = hosts.wait(40);
      for (const int rank : {1, 4, 5}) EXPECT_EQ(ended[rank].text, "") << "rank " << rank;
      for (const int rank : {0, 2, 3}) EXPECT_TRUE(WIFSIGNALED(ended[rank].status)) << "rank " << rank;
      const auto verdict = test::run_ranks(1, [&](const World&) { return test::LocalJudge(*record, how).verdict(); });
      EXPECT_EQ(verdict.front().text, "");
    }
  }
}

// Ranks stand still; those of other hosts ask their launchers to kill them.
void stand_still(const Kind& kind, const std::vector<Death>& deaths, ElasticOptions options,
                 const test::Trained& trained = {}) {
  options.straggler_seconds = 1;
  const test::SharedRecord record;
  auto over_that = over(kind.transport);
  over_that.timeout_seconds = 10;
  std::vector<int> later(kind.hosts.size());
  later[0] = 1;  // ranks might join, so that launchers are asked
  ForkedHosts hosts(
      kind.hosts, [&](const World& world) { return test::train(world, *record, 1, deaths, options, trained); },
      over_that, later);
  auto ended = hosts.wait(40);
  ended.resize(static_cast<size_t>(kind.ranks()));
  std::vector<int> victims;
  for (const auto& death : deaths) {
    victims.push_back(death.rank);
    EXPECT_TRUE(WIFSIGNALED(ended[static_cast<size_t>(death.rank)].status)) << "rank " << death.rank << " lives";
  }
  check(ended, victims, *record, 1, kind.transport == "tcp" || trained.sharding != test::Sharding::none, trained);
}

TEST_F(ElasticHosts, ELA08_ranks_of_other_hosts_that_stand_still_are_killed_by_their_launchers) {
  for (const auto& kind : {kinds[0], kinds[2]}) {
    for (const auto moment : {Moment::in_backward, Moment::before_update}) {
      SCOPED_TRACE(kind.transport + " " + std::to_string(static_cast<int>(moment)));
      stand_still(kind, {{kind.ranks() - 1, moment, 4, SIGSTOP}}, {});
    }
  }
  // All ranks of a host: it is silent, too.
  stand_still(kinds[0], {{2, Moment::in_backward, 4, SIGSTOP}, {3, Moment::in_backward, 4, SIGSTOP}}, {});
  stand_still(kinds[3], {{1, Moment::in_backward, 4, SIGSTOP}}, quick);
  for (const auto moment : {Moment::before_commit, Moment::in_update, Moment::after_update}) {
    stand_still(kinds[0], {{0, moment, 4, SIGSTOP}}, {}, {.sharding = test::Sharding::hybrid, .optimizer = "adamw"});
  }
}

TEST_F(ElasticHosts, ELA08_without_launchers_that_kill_stragglers_are_refused) {
  ForkedHosts hosts(
      {1, 1},
      [&](const World& world) {
        const test::SharedRecord record;
        return test::train(world, *record, 1, {}, {.straggler_seconds = 1});
      },
      over("tcp"));
  for (const auto& ended : hosts.wait(40)) EXPECT_THAT(ended.text, HasSubstr("--elastic MIN:MAX"));
}

}  // namespace
}  // namespace shoal::elastic_hosts_test
