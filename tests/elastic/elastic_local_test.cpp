// LocalUpdates with ranks that are killed at any moment, and others that come. A repetition in one process, with a
// replica of each rank, must have the same parameters after each step.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>
#include <fstream>
#include <iterator>
#include <numeric>
#include <random>

#include "shoal/error.h"
#include "shoal/training.h"
#include "tests/elastic/elastic_deaths.h"
#include "tests/elastic/elastic_join.h"
#include "tests/elastic/elastic_local_judge.h"

namespace shoal::elastic_local_test {
namespace {

using test::Death;
using test::JoinJob;
using test::LocalJudge;
using test::LocalMethod;
using test::Moment;
using test::SharedLocalRecord;
using test::train_locally;

// Local SGD, SlowMo and DiLoCo; parts that travel while ranks train, a warm-up, buffers, parameters that the program
// writes.
std::vector<LocalMethod> methods() {
  const SlowMo slow{.slow_lr = 0.9, .slow_momentum = 0.6};
  return {{{.every = 3}},
          {{.every = 1, .average_buffers = true}},
          {{.every = 2, .outer = slow}},
          {{.every = 4, .outer = OuterNesterov{}, .fragments = 2}, /*writes=*/true},
          {{.every = 4, .outer = OuterNesterov{}, .fragments = 2, .delay = 2}},
          {{.every = 4, .outer = slow, .delay = 3}},
          {{.every = 5, .fragments = 4, .delay = 3, .alpha = 0.3, .average_buffers = true}},
          {{.every = 3, .outer = OuterNesterov{}, .warmup_steps = 4}}};
}

constexpr int most_wide_steps = 20;

std::string name_of(const LocalMethod& how) {
  const auto& options = how.options;
  return fmt::format("outer {}, every {}, fragments {}, delay {}, warm-up {}", options.outer.index(), options.every,
                     options.fragments, options.delay, options.warmup_steps);
}

// The verdict, or the numbers of exchanges over all ranks of a step and over fewer: "12 0". In a process of its own,
// because one that has run backward must not fork.
std::string judged(const test::LocalRecord& record, const LocalMethod& how) {
  const auto ended = test::run_ranks(1, [&](const World&) {
    LocalJudge judge(record, how);
    const auto fault = judge.verdict();
    return fault.empty() ? fmt::format("{} {}", judge.whole, judge.smaller) : fault;
  });
  return WIFEXITED(ended.front().status) ? ended.front().text : "the judge has crashed";
}

void expect_right(const test::LocalRecord& record, const LocalMethod& how) {
  EXPECT_THAT(judged(record, how), testing::MatchesRegex("[0-9]+ [0-9]+"));
}

void check(const std::vector<test::RankEnded>& ended, const std::vector<int>& may_be_killed,
           const test::LocalRecord& record, const LocalMethod& how) {
  size_t left = 0;
  for (size_t rank = 0; rank < ended.size(); ++rank) {
    if (WIFSIGNALED(ended[rank].status)) {
      EXPECT_EQ(WTERMSIG(ended[rank].status), SIGKILL) << "rank " << rank << " hung or crashed";
      EXPECT_TRUE(std::count(may_be_killed.begin(), may_be_killed.end(), rank) == 1) << "rank " << rank;
      continue;
    }
    ++left;
    EXPECT_EQ(ended[rank].text, "") << "rank " << rank;
  }
  if (left > 0) expect_right(record, how);
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1) << "a process is left";
}

void die_at(int ranks, const std::vector<Death>& deaths, const LocalMethod& how, const WorldOptions& options = {},
            const ElasticOptions& chosen = {}) {
  const SharedLocalRecord record;
  const auto ended = test::run_ranks(
      ranks, [&](const World& world) { return train_locally(world, *record, how, deaths, chosen); }, test::end_standing,
      options);
  std::vector<int> victims;
  for (const auto& death : deaths) {
    victims.push_back(death.rank);
    EXPECT_TRUE(WIFSIGNALED(ended[death.rank].status)) << "rank " << death.rank << " did not come to its end";
  }
  check(ended, victims, *record, how);
}

TEST(ElasticLocal, ELA12_without_deaths_the_state_is_that_of_one_process) {
  int fewer = 0;
  for (const auto& how : methods()) {
    for (const int ranks : {1 + fewer++ % 2, 3}) {
      SCOPED_TRACE(fmt::format("{}, {} ranks", name_of(how), ranks));
      die_at(ranks, {}, how);
    }
  }
}

// In three steps after one another, with an exchange or without one; with a warm-up, the last ones of it.
TEST(ElasticLocal, ELA12_a_rank_ends_at_each_moment_of_a_step) {
  // Methods differ in their update; they share the moments before it and behind it among them.
  const std::vector<Moment> alike{Moment::before_forward, Moment::in_backward, Moment::between_steps};
  int number = 0;
  size_t next = 0;
  for (const auto& how : methods()) {
    for (const auto moment : {Moment::before_commit, Moment::before_update, Moment::after_update, Moment::evaluation,
                              alike[next++ % alike.size()]}) {
      const int victim = number++ % 3;
      const int first = how.options.warmup_steps > 0 ? 2 : 4;
      SCOPED_TRACE(fmt::format("{}, moment {}, rank {}", name_of(how), static_cast<int>(moment), victim));
      die_at(3, {{victim, moment, moment == Moment::evaluation ? 1 : first + number % 3}}, how);
    }
  }
}

TEST(ElasticLocal, ELA12_ranks_end_while_others_recover_and_one_is_left) {
  for (const auto& how : methods()) {
    SCOPED_TRACE(name_of(how));
    die_at(4, {{3, Moment::after_update, 4}, {0, Moment::after_recovery, 4}, {2, Moment::before_commit, 9}}, how);
  }
}

TEST(ElasticLocal, ELA12_over_sockets_on_one_host) {
  for (const std::string transport : {"tcp", "gloo"}) {
    WorldOptions options;
    options.transport = transport;
    for (const auto& how : {methods()[0], methods()[4]}) {
      SCOPED_TRACE(fmt::format("{} over {}", name_of(how), transport));
      die_at(3, {{0, Moment::after_update, 4}, {1, Moment::in_backward, 8}}, how, options);
    }
  }
}

TEST(ElasticLocal, ELA08_ELA12_a_rank_that_stands_still_is_left_out) {
  for (const auto moment : {Moment::before_commit, Moment::after_update}) {
    SCOPED_TRACE(static_cast<int>(moment));
    die_at(3, {{.rank = 1, .moment = moment, .step = 4, .signal = SIGSTOP}}, methods()[2], {},
           {.straggler_seconds = 0.5});
  }
}

// Returns once a process has slept for a fifth of a second, as one that waits for others does, and not one that the
// system does not let run.
void await_sleep(pid_t pid) {
  for (int asleep = 0, looks = 0; asleep < 20 && looks < 1000; ++looks) {
    usleep(10'000);
    std::ifstream file(fmt::format("/proc/{}/stat", pid));
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    const auto name_end = text.rfind(") ");
    asleep = name_end != std::string::npos && text[name_end + 2] == 'S' ? asleep + 1 : 0;
  }
}

// A rank stands still after its update, so that the others wait in the exchange, and one of those ends there.
TEST(ElasticLocal, ELA12_a_rank_ends_in_an_exchange_that_none_has_applied) {
  for (const auto& how : {methods()[1], methods()[2], methods()[3]}) {
    for (const int victim : {0, 2}) {
      SCOPED_TRACE(fmt::format("{}, rank {}", name_of(how), victim));
      const SharedLocalRecord record;
      const auto ended = test::run_ranks(
          3,
          [&](const World& world) {
            return train_locally(world, *record, how,
                                 {{.rank = 1, .moment = Moment::after_update, .step = 4, .signal = SIGSTOP}});
          },
          [&](const std::vector<pid_t>& pids) {
            siginfo_t info{};
            waitid(P_PID, static_cast<id_t>(pids[1]), &info, WSTOPPED | WNOWAIT);
            for (const int other : {0, 2}) await_sleep(pids[static_cast<size_t>(other)]);  // in the exchange
            kill(pids[victim], SIGKILL);
            usleep(50'000);  // until the other one has noticed
            do {             // it stops again in each later step
              kill(pids[1], SIGCONT);
              usleep(5'000);
              info.si_pid = 0;
              waitid(P_PID, static_cast<id_t>(pids[1]), &info, WEXITED | WNOHANG | WNOWAIT);
            } while (info.si_pid == 0);
          });
      check(ended, {victim}, *record, how);
      EXPECT_THAT(judged(*record, how), testing::MatchesRegex("[0-9]+ [1-9][0-9]*")) << "over two of three ranks";
    }
  }
}

// By the clock: SHOAL_KILLS trials, from SHOAL_SEED.
TEST(ElasticLocal, ELA12_ranks_end_at_random_moments) {
  const int seed = test::number_of("SHOAL_SEED", 1);
  std::mt19937 random(static_cast<unsigned>(seed));
  const auto all = methods();
  test::Kills kills;
  for (int trial = 0; trial < test::number_of("SHOAL_KILLS", 8) && !testing::Test::HasFailure(); ++trial) {
    const int ranks = 2 + static_cast<int>(random() % 3);
    std::vector<int> victims(ranks);
    std::iota(victims.begin(), victims.end(), 0);
    std::shuffle(victims.begin(), victims.end(), random);
    victims.resize(1 + random() % (ranks - 1));
    std::vector<int> pauses;
    for (size_t i = 0; i < victims.size(); ++i) pauses.push_back(static_cast<int>(random() % 12'000));
    const auto& how = all[trial % all.size()];
    SCOPED_TRACE(fmt::format("seed {}, trial {}, {}: of {} ranks, {} after {} us", seed, trial, name_of(how), ranks,
                             fmt::join(victims, ", "), fmt::join(pauses, ", ")));
    const SharedLocalRecord record;
    const auto ended = test::run_ranks(
        ranks, [&](const World& world) { return train_locally(world, *record, how); },
        [&](const std::vector<pid_t>& pids) {
          const double deadline = test::now() + 20;
          while (record->started < ranks && test::now() < deadline) usleep(200);
          for (size_t i = 0; i < victims.size(); ++i) {
            usleep(static_cast<useconds_t>(pauses[i]));
            kill(pids[victims[i]], SIGKILL);
          }
        });
    check(ended, victims, *record, how);
    kills.count(ended);
  }
  fmt::print("{}\n", kills.text());
  EXPECT_GT(kills.all, 0);
}

// A model whose exchange takes longer than all else of a step, so that ranks end in it. Each rank's gradient is its
// number, so that a parameter shows over which ranks a mean was.
struct Wide : torch::nn::Module {
  Wide() { weight = register_parameter("weight", at::zeros({int64_t{1} << 20}, at::kDouble)); }
  at::Tensor weight;
};

struct Seen {
  std::atomic<int> step;
  double value[most_wide_steps];
  uint64_t digest[most_wide_steps];
};

std::string train_wide(const World& world, Seen* seen) {
  alarm(60);
  const int self = world.rank();
  auto net = std::make_shared<Wide>();
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(1));
  LocalUpdates local(net, optimizer, world.group(), {.every = 1});
  Elastic elastic(world, local, {.on_change = [](const ElasticChange&) {}});
  while (elastic.steps() < most_wide_steps) {
    const auto compute = [&] { net->weight.mutable_grad() = at::full_like(net->weight, std::pow(10, self)); };
    if (!elastic.step(1, compute, [&] { local.step(); })) continue;
    const auto step = elastic.steps();
    seen[self].value[step - 1] = net->weight[step].item<double>();
    seen[self].digest[step - 1] = digest_of(net->weight);
    seen[self].step = static_cast<int>(step);
    local.zero_grad();
  }
  return "";
}

// Of `ranks`: those whose gradients' mean this is; empty: none.
std::vector<int> ranks_in(double mean, int ranks) {
  for (unsigned mask = 1; mask < (1U << ranks); ++mask) {
    std::vector<int> some;
    double sum = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      if ((mask >> rank & 1U) == 0) continue;
      some.push_back(rank);
      sum += std::pow(10, rank);
    }
    if (std::abs(mean - sum / static_cast<double>(some.size())) < 1e-6) return some;
  }
  return {};
}

TEST(ElasticLocal, ELA12_ranks_end_in_an_exchange) {
  constexpr int ranks = 4;
  std::mt19937 random(static_cast<unsigned>(test::number_of("SHOAL_SEED", 1)));
  for (int trial = 0; trial < test::number_of("SHOAL_KILLS", 4) && !testing::Test::HasFailure(); ++trial) {
    const int victim = static_cast<int>(random() % ranks);
    const auto pause = static_cast<useconds_t>(random() % 60'000);
    SCOPED_TRACE(fmt::format("trial {}: rank {} after {} us", trial, victim, pause));
    WorldOptions options;
    options.transport = trial % 2 == 0 ? "host" : "tcp";
    constexpr size_t bytes = ranks * sizeof(Seen);
    auto* seen = static_cast<Seen*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    ASSERT_NE(seen, MAP_FAILED);
    const auto ended = test::run_ranks(
        ranks, [&](const World& world) { return train_wide(world, seen); },
        [&](const std::vector<pid_t>& pids) {
          for (int i = 0; i < 100'000 && seen[victim].step == 0; ++i) usleep(200);
          usleep(pause);
          kill(pids[victim], SIGKILL);
        },
        options);
    ASSERT_TRUE(WIFSIGNALED(ended[victim].status)) << "it was killed while the ranks trained";
    double before = 0;
    for (int step = 0; step < most_wide_steps; ++step) {
      const auto& first = seen[victim == 0 ? 1 : 0];
      for (int rank = 0; rank < ranks; ++rank) {
        if (rank == victim && seen[rank].step <= step) continue;
        EXPECT_EQ(ended[rank].text, "") << rank;
        ASSERT_EQ(seen[rank].digest[step], first.digest[step]) << "ranks differ after step " << step + 1;
      }
      const auto mean_of = ranks_in(before - first.value[step], ranks);
      before = first.value[step];
      EXPECT_GE(mean_of.size(), ranks - 1) << "step " << step + 1;
      EXPECT_TRUE(mean_of.size() == ranks || std::count(mean_of.begin(), mean_of.end(), victim) == 0);
      if (step < most_wide_steps - 1) continue;
      EXPECT_EQ(mean_of.size(), ranks - 1) << "nobody waits for the dead";
    }
    munmap(seen, bytes);
  }
}

// A newcomer begins with the mean of the parameters, and with one rank's optimizer state.
TEST(ElasticLocal, ELA06_ELA12_from_3_to_2_to_3_to_4_ranks) {
  auto all = methods();
  all.push_back({{.every = 3, .outer = OuterNesterov{}, .warmup_steps = 7}});  // one comes within the warm-up
  for (const auto& how : all) {
    SCOPED_TRACE(name_of(how));
    const SharedLocalRecord record;
    const auto body = [&](const World& world) { return train_locally(world, *record, how); };
    const auto reach = [&](const std::vector<int>& members, int64_t step) {
      return JoinJob::comes_true([&] {
        return std::all_of(members.begin(), members.end(), [&](int member) {
          const auto& list = record->begun[member];
          return list.count > 0 && list.entries[list.count - 1].step > step;
        });
      });
    };
    record->last_step = 3;
    JoinJob job(3, body);
    ASSERT_TRUE(reach({0, 1, 2}, 3));
    job.signal(0, SIGKILL);
    record->last_step = 5;
    ASSERT_TRUE(reach({1, 2}, 5));
    const int fourth = job.add(body);
    ASSERT_TRUE(job.comes_to_knock(fourth));
    record->last_step = 8;
    ASSERT_TRUE(reach({1, 2, fourth}, 8));
    const int fifth = job.add(body);
    ASSERT_TRUE(job.comes_to_knock(fifth));
    record->last_step = 0;
    for (const int member : {1, 2, fourth, fifth}) {
      const auto ended = job.end_of(member);
      EXPECT_TRUE(WIFEXITED(ended.status)) << member;
      EXPECT_EQ(ended.text, "") << member;
    }
    EXPECT_GT(record->complete[fifth].count, 0) << "it has joined";
    expect_right(*record, how);
  }
}

std::string refusal(const std::function<void()>& work) {
  try {
    work();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "nothing was refused";
}

TEST(ElasticLocal, ELA12_an_update_that_is_not_that_of_LocalUpdates_is_refused) {
  const auto ended = test::run_ranks(2, [](const World& world) {
    auto net = std::make_shared<test::LocalNet>();
    torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(0.01));
    LocalUpdates local(net, optimizer, world.group(), {.every = 2});
    const auto compute = [&] { test::local_loss(*net, {1, 2}).backward(); };
    std::string texts;
    {
      Elastic elastic(world, local);
      texts += refusal([&] { elastic.step(2, compute, [&] { optimizer.step(); }); }) + "\n";
      local.zero_grad();
      texts += refusal([&] { local.step(); }) + "\n";
    }
    local.zero_grad();
    local.step();  // without Elastic it communicates again
    auto other = std::make_shared<test::LocalNet>();
    torch::optim::Adam of_other(other->parameters(), torch::optim::AdamOptions(0.01));
    LocalUpdates warming(other, of_other, world.group(), {.every = 2, .warmup_steps = 2});
    for (auto* updates : {&local, &warming}) {
      if (refusal([&] {
            Elastic(world, *updates, {.keep_global_batch = 4});
          }).find("keep_global_batch needs gradients that are averaged over all ranks") == std::string::npos) {
        texts += "a kept batch was not refused";
      }
    }
    return texts;
  });
  for (const auto& one : ended) {
    for (const auto* text : {"did not call step() of LocalUpdates", "and nowhere else"}) {
      EXPECT_NE(one.text.find(text), std::string::npos) << text << " in " << one.text;
    }
    EXPECT_EQ(one.text.find("not refused"), std::string::npos) << one.text;
  }
}

}  // namespace
}  // namespace shoal::elastic_local_test
