// Ranks that live and do nothing: the others kill them and go on. Afterwards a judge repeats the training in one
// process.

#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "tests/elastic/elastic_deaths.h"

namespace shoal::elastic_straggler_test {
namespace {

using test::check;
using test::die_at;
using test::Moment;
using test::name_of;
using test::number_of;
using test::sharded;
using test::Sharding;
using test::Trained;

// A rank that is late by two seconds is killed: no other one must be, however busy the machine is.
const ElasticOptions impatient{.straggler_seconds = 1};

TEST(ElasticStraggler, ELA08_a_rank_stands_still_at_each_moment_of_a_step) {
  int victim = 0;
  for (const auto moment : {Moment::before_forward, Moment::in_backward, Moment::before_update, Moment::after_update,
                            Moment::between_steps, Moment::evaluation}) {
    SCOPED_TRACE(fmt::format("moment {}, rank {}", static_cast<int>(moment), victim));
    die_at(3, {{victim, moment, moment == Moment::evaluation ? 1 : 5, SIGSTOP}}, 1, {}, {}, impatient);
    victim = 2 - victim;
  }
}

TEST(ElasticStraggler, ELA08_a_rank_stands_still_over_sockets) {
  for (const std::string transport : {"tcp", "gloo"}) {
    SCOPED_TRACE(transport);
    WorldOptions options;
    options.transport = transport;
    die_at(3, {{0, Moment::in_backward, 5, SIGSTOP}}, 1, options, {}, impatient);
  }
}

TEST(ElasticStraggler, ELA08_sharded_a_rank_stands_still_in_its_update) {
  const std::vector<Moment> moments{Moment::before_commit, Moment::in_last_chunk, Moment::after_update};
  size_t next = 0;
  for (const auto& trained : sharded) {
    for (const auto moment : {Moment::in_update, moments[next++ % moments.size()]}) {
      const int victim = trained.sharding == Sharding::zero1 || trained.has_copies() ? 2 : 0;
      SCOPED_TRACE(fmt::format("{}, moment {}, rank {}", name_of(trained), static_cast<int>(moment), victim));
      die_at(3, {{victim, moment, 5, SIGSTOP}}, 1, {}, trained, impatient);
    }
  }
}

// Rank 3 has died in its update. Rank 0 finishes its share, and stands still in it.
TEST(ElasticStraggler, ELA08_sharded_the_rank_that_finishes_a_share_stands_still) {
  for (const auto& trained : {sharded.front(), sharded.back()}) {
    SCOPED_TRACE(name_of(trained));
    die_at(4, {{3, Moment::spoilt_update, 4}, {0, Moment::finishing, 4, SIGSTOP}}, 1, {}, trained, impatient);
  }
}

TEST(ElasticStraggler, ELA08_two_ranks_stand_still_and_ranks_stand_still_while_others_recover) {
  die_at(4, {{0, Moment::in_backward, 4, SIGSTOP}, {2, Moment::in_backward, 4, SIGSTOP}}, 1, {}, {}, impatient);
  die_at(4, {{0, Moment::in_backward, 4}, {1, Moment::on_notice, 4, SIGSTOP}}, 1, {}, {}, impatient);
  die_at(4, {{3, Moment::before_commit, 4, SIGSTOP}, {0, Moment::after_recovery, 4}}, 1, {}, {}, impatient);
}

// Stops by the clock, of one rank: SHOAL_STOPS trials, from SHOAL_SEED.
TEST(ElasticStraggler, ELA08_ranks_stand_still_at_random_moments) {
  std::mt19937 random(static_cast<unsigned>(number_of("SHOAL_SEED", 1)));
  const int trials = number_of("SHOAL_STOPS", 6);
  int killed = 0;
  for (int trial = 0; trial < trials && !testing::Test::HasFailure(); ++trial) {
    const int ranks = 2 + static_cast<int>(random() % 3);
    const int victim = static_cast<int>(random() % static_cast<unsigned>(ranks));
    const auto pause = static_cast<useconds_t>(random() % 80'000);
    const auto trained = trial % 4 == 0 ? Trained() : sharded[static_cast<size_t>(trial) % sharded.size()];
    SCOPED_TRACE(fmt::format("{}, trial {}: rank {} of {} after {} us", name_of(trained), trial, victim, ranks, pause));
    const test::SharedRecord record;
    const auto ended = test::run_ranks(
        ranks, [&](const World& world) { return test::train(world, *record, 4, {}, impatient, trained); },
        [&](const std::vector<pid_t>& pids) {
          const double deadline = test::now() + 20;
          while (record->started < ranks && test::now() < deadline) usleep(200);
          usleep(pause);
          const auto process = static_cast<id_t>(pids[static_cast<size_t>(victim)]);
          kill(pids[static_cast<size_t>(victim)], SIGSTOP);
          // Where it had done with the job, nobody waits for it.
          siginfo_t info{};
          for (int i = 0; i < 100 && info.si_pid == 0; ++i) {
            usleep(100'000);
            waitid(P_PID, process, &info, WEXITED | WNOHANG | WNOWAIT);
          }
          kill(pids[static_cast<size_t>(victim)], SIGCONT);
        });
    killed += WIFSIGNALED(ended[static_cast<size_t>(victim)].status) ? 1 : 0;
    check(ended, {victim}, *record, 4, true, trained);
  }
  EXPECT_GT(2 * killed, trials);
}

// Rank 1 is stopped for `seconds`, and must stay.
void stop_and_go_on(const Trained& trained, double seconds, ElasticOptions chosen) {
  SCOPED_TRACE(name_of(trained));
  const test::SharedRecord record;
  record->last_step = 10;
  std::atomic<int>& changes = record->first_epoch[test::most_members - 1];  // shared by all ranks
  chosen.on_change = [&](const ElasticChange& change) {
    if (!change.lost.empty()) std::abort();
    ++changes;
  };
  const auto ended = test::run_ranks(
      3, [&](const World& world) { return test::train(world, *record, 1, {}, chosen, trained); },
      [&](const std::vector<pid_t>& pids) {
        const double deadline = test::now() + 20;
        while (record->complete[1].end() - record->complete[1].begin() < 10 && test::now() < deadline) usleep(200);
        kill(pids[1], SIGSTOP);
        record->last_step = 0;
        usleep(static_cast<useconds_t>(1e6 * seconds));
        kill(pids[1], SIGCONT);
      });
  check(ended, {}, *record, 1, true, trained);
  EXPECT_GE(changes, 3) << "the others have given up a step";
}

// The others wait once and give up the step, wait again, and it is there.
TEST(ElasticStraggler, ELA08_a_rank_that_answers_in_time_stays) {
  for (const auto& trained : {Trained(), sharded.front()}) stop_and_go_on(trained, 3, {.straggler_seconds = 2});
}

TEST(ElasticStraggler, ELA08_a_rank_without_which_too_few_are_left_is_waited_for) {
  stop_and_go_on(Trained(), 4, {.min_ranks = 3, .straggler_seconds = 1});
}

TEST(ElasticStraggler, ELA08_limits_that_cannot_hold_are_refused) {
  for (const double limit : {-1.0, 30.0, static_cast<double>(NAN)}) {
    const test::SharedRecord record;
    const auto ended = test::run_ranks(
        2, [&](const World& world) { return test::train(world, *record, 1, {}, {.straggler_seconds = limit}); });
    for (const auto& one : ended) EXPECT_NE(one.text.find("straggler_seconds is"), std::string::npos) << one.text;
  }
}

}  // namespace
}  // namespace shoal::elastic_straggler_test
