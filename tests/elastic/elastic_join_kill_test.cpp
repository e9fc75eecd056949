// Ranks that are killed or stopped at random moments while processes come to an elastic job.

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <random>

#include "tests/elastic/elastic_join.h"

namespace shoal::elastic_join_kill_test {
namespace {

using test::expect_good;
using test::JoinJob;
using test::number_of;
using test::reach;

enum class Fault { newcomer_is_killed, member_is_killed, newcomer_is_stopped };

// One trial: a newcomer comes, and something happens to it or a member at a random moment from its start on.
void join_with(Fault fault, int trial, std::mt19937& random) {
  constexpr int epochs = 5;
  // Two of three trials shard, first in one way of each strategy, then in the others.
  const auto turn = static_cast<size_t>(trial - trial / 3 - 1);
  const auto trained = trial % 3 == 0 ? test::Trained() : test::sharded[(2 * turn + turn / 4) % test::sharded.size()];
  SCOPED_TRACE(test::name_of(trained));
  const test::SharedRecord record;
  const auto body = [&](const World& world) {
    return test::train(world, *record, epochs, {}, {.on_change = [](const ElasticChange&) { usleep(2000); }}, trained);
  };
  record->last_step = 3;
  const int ranks = 2 + static_cast<int>(random() % 2);
  JoinJob job(ranks, body);
  std::vector<int> members(static_cast<size_t>(ranks));
  std::iota(members.begin(), members.end(), 0);
  ASSERT_TRUE(reach(*record, members, 3));
  const int newcomer = job.add(body);
  // Half of the trials begin with its knock, near the admission; the others anywhere in its start.
  const bool near = trial % 2 == 0;
  if (near) {
    ASSERT_TRUE(job.comes_to_knock(newcomer));
  }
  record->last_step = 0;
  const auto pause = static_cast<useconds_t>(random() % (near ? 15'000 : 60'000));
  usleep(pause);
  SCOPED_TRACE(fmt::format("trial {}: {} ranks, after {} us{}", trial, ranks, pause, near ? " from its knock" : ""));
  if (fault == Fault::member_is_killed) {
    const int victim = static_cast<int>(random() % static_cast<unsigned>(ranks));
    job.signal(victim, SIGKILL);
    std::erase(members, victim);
    job.end_of(victim);
  } else {
    job.signal(newcomer, fault == Fault::newcomer_is_killed ? SIGKILL : SIGSTOP);
  }
  if (fault == Fault::newcomer_is_stopped) {
    usleep(300'000);
    // The job goes on without it, or waits for it as for any member; it must end in either case.
    for (int i = 0; i < 120 && record->evaluations[members.front()] < epochs; ++i) usleep(100'000);
    job.signal(newcomer, SIGCONT);
  }
  expect_good(job, members, *record, epochs);
  const auto ended = job.end_of(newcomer);
  if (fault != Fault::newcomer_is_killed) {
    EXPECT_TRUE(WIFEXITED(ended.status)) << ended.status;
    const bool good = ended.text.empty() || ended.text.find("has ended") != std::string::npos ||
                      (fault == Fault::newcomer_is_stopped && ended.text.starts_with("error: "));
    EXPECT_TRUE(good) << ended.text;
  }
  EXPECT_EQ(test::judged(*record, epochs, true, trained), "");
}

void join_often_with(Fault fault, int trials) {
  const int seed = number_of("SHOAL_SEED", 1);
  std::mt19937 random(static_cast<unsigned>(seed));
  for (int trial = 0; trial < trials && !testing::Test::HasFailure(); ++trial) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    join_with(fault, trial, random);
  }
}

TEST(ElasticJoin, ELA06_a_newcomer_is_killed_at_random_moments) {
  join_often_with(Fault::newcomer_is_killed, number_of("SHOAL_KILLS", 8));
}

TEST(ElasticJoin, ELA06_a_member_is_killed_while_a_newcomer_joins) {
  join_often_with(Fault::member_is_killed, number_of("SHOAL_KILLS", 8));
}

// Rank 1 is stopped within the collective call of an admission, to which it has given its part. Rank 0 admits the
// newcomer, which answers, and is killed before rank 1 has read of it.
TEST(ElasticJoin, ELA06_only_the_newcomer_has_seen_its_admission_when_the_first_rank_is_killed) {
  const test::SharedRecord record;
  const auto body = [&](const World& world) -> std::string {
    alarm(30);
    test::JoinParts parts(world);
    torch::optim::Adam optimizer(parts.net->parameters(), torch::optim::AdamOptions(0.01));
    Elastic elastic(world, parts.parallel, optimizer, {.on_change = [](const ElasticChange&) {}});
    const auto x = test::inputs_of({1, 2});
    while (elastic.steps() < 12) {
      const bool is_held = world.rank() == 0 || elastic.steps() < 6;
      while (is_held && record->last_step != 0 && elastic.steps() >= record->last_step) usleep(200);
      const auto compute = [&] { test::loss_of(parts.parallel.forward(x), x).backward(); };
      if (elastic.step(2, compute, [&] { optimizer.step(); })) record->evaluations[world.rank()] = elastic.steps();
      optimizer.zero_grad();
    }
    return fmt::format("{} on {}", test::hash_of(optimizer, *parts.net), world.size());
  };
  record->last_step = 5;
  JoinJob job(2, body);
  ASSERT_TRUE(JoinJob::comes_true([&] { return record->evaluations[0] == 5 && record->evaluations[1] == 5; }));
  const int newcomer = job.add(body);
  ASSERT_TRUE(job.comes_to_knock(newcomer));
  record->last_step = 6;  // whose commit tells both of the newcomer
  ASSERT_TRUE(JoinJob::comes_true([&] { return record->evaluations[0] == 6 && record->evaluations[1] == 6; }));
  usleep(300'000);
  job.signal(1, SIGSTOP);
  record->last_step = 0;
  usleep(300'000);
  job.signal(0, SIGKILL);
  job.end_of(0);
  job.signal(1, SIGCONT);
  const auto ended = job.end_of(1);
  EXPECT_NE(ended.text.find(" on 2"), std::string::npos) << ended.text;
  EXPECT_EQ(job.end_of(newcomer).text, ended.text);
}

TEST(ElasticJoin, ELA06_a_newcomer_is_stopped_while_it_joins) {
  join_often_with(Fault::newcomer_is_stopped, number_of("SHOAL_STOPS", 2));
}

}  // namespace
}  // namespace shoal::elastic_join_kill_test
