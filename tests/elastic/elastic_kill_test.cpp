// Ranks that are killed at any moment of an elastic training. The others go on; afterwards a judge repeats the training
// in one process, step by step, and compares the bits of parameters and optimizer state.

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <random>
#include <set>
#include <thread>

#include "tests/elastic/elastic_deaths.h"

namespace shoal::elastic_kill_test {
namespace {

using test::check;
using test::die_at;
using test::Moment;
using test::name_of;
using test::number_of;
using test::sharded;
using test::Sharding;
using test::Trained;

TEST(ElasticKill, ELA01_ELA02_a_rank_ends_at_each_moment_of_a_step) {
  for (const auto moment :
       {Moment::before_forward, Moment::after_forward, Moment::in_backward, Moment::before_commit,
        Moment::before_update, Moment::after_update, Moment::between_steps, Moment::in_evaluation}) {
    for (const int victim : {0, 2}) {
      SCOPED_TRACE(fmt::format("moment {}, rank {}", static_cast<int>(moment), victim));
      die_at(3, {{victim, moment, 5}});
    }
  }
}

TEST(ElasticKill, ELA01_ranks_end_in_the_first_step_and_one_is_left) {
  die_at(2, {{0, Moment::in_backward, 1}});
  die_at(3, {{0, Moment::before_commit, 1}, {1, Moment::in_backward, 2}});
}

TEST(ElasticKill, ELA01_ranks_end_in_different_epochs) {
  die_at(4, {{1, Moment::in_backward, 4}, {0, Moment::before_commit, 15}, {3, Moment::in_backward, 30}}, 3);
}

// Gloo does not add in the order of ranks: the ranks' bits are compared with each other only.
TEST(ElasticKill, ELA01_ELA02_over_sockets_on_one_host) {
  for (const std::string transport : {"tcp", "gloo"}) {
    WorldOptions options;
    options.transport = transport;
    for (const auto moment : {Moment::in_backward, Moment::before_commit, Moment::between_steps}) {
      SCOPED_TRACE(transport + " " + std::to_string(static_cast<int>(moment)));
      die_at(3, {{0, moment, 5}}, 1, options);
    }
  }
}

// Each rank's share has a second owner there, as over tcp.
TEST(ElasticKill, ELA01_ELA02_ELA04_sharded_over_gloo_on_one_host) {
  WorldOptions options;
  options.transport = "gloo";
  const std::vector<Moment> moments{Moment::in_backward, Moment::in_evaluation, Moment::spoilt_update,
                                    Moment::before_commit};
  size_t number = 0;
  for (const auto& trained : {Trained{.sharding = Sharding::fsdp, .optimizer = "adamw", .micro_batches = 2},
                              {.sharding = Sharding::fsdp, .optimizer = "adamw", .dtype = at::kBFloat16, .clip = 0.3},
                              {.sharding = Sharding::zero1, .optimizer = "adamw"},
                              {.sharding = Sharding::zero2, .optimizer = "adamw", .micro_batches = 2},
                              {.sharding = Sharding::megatron, .optimizer = "adamw", .dtype = at::kBFloat16}}) {
    for (int i = 0; i < 2; ++i) {
      const auto moment = moments[number++ % moments.size()];
      const int victim = static_cast<int>(number) % 3;
      SCOPED_TRACE(fmt::format("{}, moment {}, rank {}", name_of(trained), static_cast<int>(moment), victim));
      die_at(3, {{victim, moment, 5}}, 1, options, trained);
    }
  }
}

TEST(ElasticKill, ELA01_ranks_end_while_others_recover) {
  for (const std::string transport : {"host", "tcp", "gloo"}) {
    WorldOptions options;
    options.transport = transport;
    for (const auto moment : {Moment::on_notice, Moment::after_recovery}) {
      SCOPED_TRACE(transport + " " + std::to_string(static_cast<int>(moment)));
      die_at(4, {{0, Moment::in_backward, 4}, {1, moment, 4}}, 1, options);
      die_at(4, {{3, Moment::before_commit, 4}, {0, moment, 4}}, 1, options);
    }
  }
}

TEST(ElasticKill, ELA01_ELA02_ELA03_sharded_a_rank_ends_at_each_moment_of_a_step) {
  const std::set<Moment> without_copies{Moment::before_forward, Moment::before_commit, Moment::between_steps};
  for (const auto& trained : sharded) {
    const bool again = trained.sharding == Sharding::zero2 && trained.optimizer == "sgd";  // differs in the update
    for (const auto moment : {Moment::before_forward, Moment::in_backward, Moment::before_commit, Moment::before_update,
                              Moment::in_update, Moment::spoilt_update, Moment::in_last_chunk, Moment::after_update,
                              Moment::between_steps, Moment::in_evaluation}) {
      // Nothing depends on them there.
      if ((trained.has_copies() || again) && without_copies.contains(moment)) continue;
      const int victim = trained.sharding == Sharding::zero1 || trained.has_copies() ? 2 : 0;
      SCOPED_TRACE(fmt::format("{}, moment {}, rank {}", name_of(trained), static_cast<int>(moment), victim));
      die_at(3, {{victim, moment, 5}}, 1, {}, trained);
    }
  }
}

// Over Gloo each share has a second owner, who has to be left.
TEST(ElasticKill, ELA01_ELA02_ELA03_sharded_ranks_end_while_others_recover) {
  int number = 0;
  for (const auto& trained : sharded) {
    for (const auto moment : {Moment::on_notice, Moment::in_division}) {
      WorldOptions options;
      if (++number % 4 == 0) options.transport = "gloo";
      SCOPED_TRACE(fmt::format("{} over {}, moment {}", name_of(trained), options.transport, static_cast<int>(moment)));
      die_at(4, {{0, Moment::in_backward, 4}, {2, moment, 4}}, 1, options, trained);
    }
  }
}

// The optimizer has no state yet, and the last rank keeps it for itself.
TEST(ElasticKill, ELA02_ELA03_sharded_ranks_end_in_the_update_of_the_first_step_and_one_is_left) {
  const std::vector<Moment> moments{Moment::in_update, Moment::spoilt_update, Moment::in_last_chunk};
  size_t number = 0;
  for (const auto& trained : sharded) {
    const auto with_one = moments[number++ % moments.size()];
    for (const auto moment : moments) {
      SCOPED_TRACE(fmt::format("{}, moment {}", name_of(trained), static_cast<int>(moment)));
      if (moment == with_one) {
        die_at(2, {{0, moment, 1}}, 1, {}, trained);
      } else {
        die_at(3, {{2, moment, 1}, {0, moment, 3}}, 1, {}, trained);
      }
    }
  }
}

// Rank 0 finishes the share of rank 3, and ends in it; rank 1 finishes both.
TEST(ElasticKill, ELA02_ELA03_sharded_the_rank_that_finishes_a_share_ends) {
  for (const auto& trained : sharded) {
    SCOPED_TRACE(name_of(trained));
    die_at(4, {{3, Moment::spoilt_update, 4}, {0, Moment::finishing, 4}}, 1, {}, trained);
    die_at(4, {{0, Moment::in_last_chunk, 4}, {3, Moment::in_last_chunk, 4}, {1, Moment::after_recovery, 4}}, 1, {},
           trained);
  }
}

TEST(ElasticKill, ELA02_ELA03_sharded_a_parameter_of_two_chunks_and_an_optimizer_that_is_not_element_wise) {
  int number = 0;
  for (const auto& trained :
       {Trained{Sharding::zero1, "adamw", 258},
        {Sharding::zero2, "sgd", 258},
        {Sharding::zero2, "lamb", 258},
        {Sharding::megatron, "adamw", 600},
        {Sharding::megatron, "lamb", 258},
        {Sharding::fsdp, "lamb", 258},
        {.sharding = Sharding::fsdp, .optimizer = "adamw", .width = 600, .dtype = at::kHalf},
        {.sharding = Sharding::megatron, .optimizer = "adamw", .width = 600, .dtype = at::kBFloat16}}) {
    const int victim = number++ % 2;
    SCOPED_TRACE(fmt::format("{}, rank {}", name_of(trained), victim));
    die_at(2, {{victim, Moment::spoilt_update, 3}}, 1, {}, trained);
  }
}

// Kills by the clock: SHOAL_KILLS trials, from SHOAL_SEED.
void kill_at_random(const std::vector<Trained>& all, int trials) {
  const int seed = number_of("SHOAL_SEED", 1);
  std::mt19937 random(static_cast<unsigned>(seed));
  std::vector<double> seconds;  // from a kill to the end of the next complete step
  test::Kills kills;
  constexpr int epochs = 3;
  for (int trial = 0; trial < trials && !testing::Test::HasFailure(); ++trial) {
    const int ranks = 2 + static_cast<int>(random() % 3);
    std::vector<int> victims(ranks);
    std::iota(victims.begin(), victims.end(), 0);
    std::shuffle(victims.begin(), victims.end(), random);
    victims.resize(1 + random() % (ranks - 1));
    std::vector<int> pauses;  // microseconds before each kill
    for (size_t i = 0; i < victims.size(); ++i) {
      const bool at_once = i > 0 && random() % 3 == 0;
      const bool in_recovery = i > 0 && random() % 2 == 0;
      pauses.push_back(at_once ? 0 : static_cast<int>(random() % (in_recovery ? 15'000 : 80'000)));
    }
    const auto& trained = all[trial % all.size()];
    SCOPED_TRACE(fmt::format("seed {}, trial {}: of {} ranks, {} after {} us", seed, trial, ranks,
                             fmt::join(victims, ", "), fmt::join(pauses, ", ")));
    const test::SharedRecord record;
    std::vector<double> killed_at;
    const auto ended = test::run_ranks(
        ranks, [&](const World& world) { return test::train(world, *record, epochs, {}, {}, trained); },
        [&](const std::vector<pid_t>& pids) {
          const double deadline = test::now() + 20;
          while (record->started < ranks && test::now() < deadline) usleep(200);
          for (size_t i = 0; i < victims.size(); ++i) {
            usleep(static_cast<useconds_t>(pauses[i]));
            kill(pids[victims[i]], SIGKILL);
            killed_at.push_back(test::now());
          }
        });
    check(ended, victims, *record, epochs, true, trained);
    kills.count(ended);
    for (int rank = 0; rank < ranks; ++rank) {
      if (WIFSIGNALED(ended[rank].status)) continue;
      const auto& list = record->complete[rank];
      const auto next =
          std::find_if(list.begin(), list.end(), [&](const auto& entry) { return entry.at > killed_at.back(); });
      if (next != list.end()) seconds.push_back(next->at - killed_at.back());
      break;
    }
  }
  std::sort(seconds.begin(), seconds.end());
  if (seconds.empty()) seconds.push_back(NAN);
  fmt::print(
      "{}; from the last kill to the end of the next complete step: median {:.0f} ms, 90 % {:.0f} ms, slowest {:.0f} "
      "ms\n",
      kills.text(), seconds[seconds.size() / 2] * 1e3, seconds[seconds.size() * 9 / 10] * 1e3, seconds.back() * 1e3);
  EXPECT_GT(kills.all, 0);
}

TEST(ElasticKill, ELA01_ELA02_ranks_end_at_random_moments) {
  kill_at_random({Trained()}, number_of("SHOAL_KILLS", 12));
}

TEST(ElasticKill, ELA01_ELA02_ELA03_sharded_ranks_end_at_random_moments) {
  kill_at_random(sharded, number_of("SHOAL_KILLS", 12));
}

}  // namespace
}  // namespace shoal::elastic_kill_test
