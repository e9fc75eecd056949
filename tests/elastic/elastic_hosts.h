#pragma once
// Elastic trainings on several hosts.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "tests/elastic/elastic_deaths.h"
#include "tests/support/forked_hosts.h"

namespace shoal::test {

// A busy machine may keep all ranks of a host waiting for a second.
inline const ElasticOptions quick{.silent_host_seconds = 1.5};

inline WorldOptions over(const std::string& transport) {
  WorldOptions options;
  options.transport = transport;
  options.timeout_seconds = 8;  // more than a busy machine keeps a rank waiting for
  return options;
}

class OnHosts : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!ForkedHosts::possible()) GTEST_SKIP() << "this system does not let a process make namespaces";
  }
};

// Ranks of each host. Sockets add in the order of ranks, so that the bits can be compared with one process's.
struct Kind {
  std::vector<int> hosts;
  std::string transport;

  int ranks() const { return std::accumulate(hosts.begin(), hosts.end(), 0); }
  // By their numbers at the start.
  std::vector<int> ranks_of(size_t host) const {
    std::vector<int> list(static_cast<size_t>(hosts[host]));
    std::iota(list.begin(), list.end(), std::accumulate(hosts.begin(), hosts.begin() + static_cast<int64_t>(host), 0));
    return list;
  }
};

// Shards over the ranks of all hosts.
inline const std::vector<Trained> fully_sharded{
    {.sharding = Sharding::fsdp, .optimizer = "adamw", .micro_batches = 2},
    {.sharding = Sharding::fsdp, .optimizer = "adamw", .dtype = at::kBFloat16, .clip = 0.3},
    {.sharding = Sharding::fsdp, .optimizer = "sgd", .dtype = at::kHalf},
    {.sharding = Sharding::fsdp, .optimizer = "lamb"},
    {.sharding = Sharding::megatron, .optimizer = "adamw", .micro_batches = 2},
    {.sharding = Sharding::megatron, .optimizer = "adamw", .dtype = at::kBFloat16, .clip = 0.3},
    {.sharding = Sharding::zero1, .optimizer = "adamw", .micro_batches = 2},
    {.sharding = Sharding::zero2, .optimizer = "adamw", .micro_batches = 2}};
inline const std::vector<Trained> rarely_sharded{
    {.sharding = Sharding::megatron, .optimizer = "sgd", .dtype = at::kHalf, .overlap = false},
    {.sharding = Sharding::megatron, .optimizer = "lamb"},
    {.sharding = Sharding::zero1, .optimizer = "lamb"},
    {.sharding = Sharding::zero2, .optimizer = "sgd"}};

// Waits until all ranks train.
inline bool all_train(const Record& record, int ranks) {
  const double deadline = now() + 20;
  while (record.started < ranks && now() < deadline) usleep(200);
  return record.started == ranks;
}

// Ranks end as they are told, and the others go on to the end.
inline void die_on_hosts(const Kind& kind, const std::vector<Death>& deaths, const Trained& trained) {
  const SharedRecord record;
  ForkedHosts hosts(
      kind.hosts, [&](const World& world) { return train(world, *record, 1, deaths, quick, trained); },
      over(kind.transport));
  const auto ended = hosts.wait(40);
  std::vector<int> victims;
  for (const auto& death : deaths) {
    victims.push_back(death.rank);
    if (death.moment == Moment::on_notice || death.signal == 0) continue;  // it may notice it elsewhere
    EXPECT_TRUE(WIFSIGNALED(ended[static_cast<size_t>(death.rank)].status)) << "rank " << death.rank << " lives";
  }
  check(ended, victims, *record, 1, true, trained);
}

// Every way to shard ends in each moment of an update and before the commit. Other optimizers and dtypes differ in the
// update alone; where no step is under way, ways to shard are alike, and share the moments among them.
inline void die_at_each_moment(const std::vector<Trained>& list) {
  int number = 0;
  int shardings = 0;
  for (const auto& trained : list) {
    const bool first = trained.optimizer == "adamw" && !trained.has_copies();
    std::vector<Moment> moments{Moment::spoilt_update, Moment::in_last_chunk};
    if (first) {
      for (const auto other : {Moment::in_backward, Moment::before_commit, Moment::before_update, Moment::in_update,
                               Moment::after_update}) {
        moments.push_back(other);
      }
      for (const auto other : {Moment::before_forward, Moment::between_steps}) {
        if (shardings++ % 3 < 2) moments.push_back(other);
      }
    } else {
      moments.push_back(number % 2 == 0 ? Moment::in_backward : Moment::before_commit);
    }
    for (const auto moment : moments) {
      const Kind kind{number % 3 == 2 ? std::vector<int>{2, 2, 2} : std::vector<int>{2, 2}, "auto"};
      const int victim = ++number % kind.ranks();
      SCOPED_TRACE(fmt::format("{}, {} hosts, moment {}, rank {}", name_of(trained), kind.hosts.size(),
                               static_cast<int>(moment), victim));
      die_on_hosts(kind, {{victim, moment, 3 + number % 3}}, trained);
    }
  }
}

// Ranks and whole hosts are killed at random, with SHOAL_SEED, in SHOAL_KILLS trials. may_train: whether hosts of this
// kind can be trained so. Bits are compared over tcp, or with shards.
inline void kill_on_hosts_at_random(const std::vector<Kind>& kinds, const std::vector<Trained>& list,
                                    const std::function<bool(const Kind&, const Trained&)>& may_train) {
  const int seed = number_of("SHOAL_SEED", 1);
  const int trials = number_of("SHOAL_KILLS", static_cast<int>(std::max<size_t>(8, list.size())));
  constexpr int epochs = 3;
  std::mt19937 random(static_cast<unsigned>(seed));
  Kills kills;
  std::vector<double> seconds;
  for (int trial = 0; trial < trials && !::testing::Test::HasFailure(); ++trial) {
    // In turns, so that few trials have all kinds and all trainings.
    auto turn = static_cast<size_t>(trial + trials * (seed - 1));
    const auto& kind = kinds[(turn + turn / kinds.size()) % kinds.size()];
    while (!may_train(kind, list[turn % list.size()])) ++turn;
    const auto* trained = &list[turn % list.size()];
    std::vector<int> order(static_cast<size_t>(kind.ranks()));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    // A host whose ranks are all lost must be outweighed by those that are left.
    const bool whole = kind.hosts.size() == 3 && random() % 2 == 0;
    const size_t host = random() % kind.hosts.size();
    auto victims = whole ? kind.ranks_of(host) : std::vector<int>{order[0]};
    const int pause = static_cast<int>(random() % 80'000);
    // With a host, a rank of another one before: the host is lost in the recovery from that.
    const bool two = kind.hosts[0] > 1 && random() % 2 == 0;
    const auto other = std::find_if(order.begin(), order.end(), [&](int rank) {
      return std::find(victims.begin(), victims.end(), rank) == victims.end();
    });
    const int second = two ? *other : -1;
    SCOPED_TRACE(fmt::format("seed {}, trial {}: {}, rank(s) {} of {} hosts over {}, after {} us, second {}", seed,
                             trial, name_of(*trained), fmt::join(victims, ", "), kind.hosts.size(), kind.transport,
                             pause, second));
    const SharedRecord record;
    ForkedHosts hosts(
        kind.hosts, [&](const World& world) { return train(world, *record, epochs, {}, quick, *trained); },
        over(kind.transport));
    EXPECT_TRUE(all_train(*record, hosts.ranks()));
    usleep(static_cast<useconds_t>(pause));
    if (second >= 0) {
      hosts.signal(second, SIGKILL);
      usleep(static_cast<useconds_t>(random() % (whole ? 150'000 : 15'000)));
    }
    whole ? hosts.kill_host(static_cast<int>(host)) : hosts.signal(victims[0], SIGKILL);
    if (second >= 0) victims.push_back(second);
    const double killed = now();
    const auto ended = hosts.wait(40);
    check(ended, victims, *record, epochs, kind.transport == "tcp" || trained->sharding != Sharding::none, *trained);
    const auto left =
        std::find_if(ended.begin(), ended.end(), [](const auto& one) { return !WIFSIGNALED(one.status); });
    const auto& steps = record->complete[left - ended.begin()];
    const auto next = std::find_if(steps.begin(), steps.end(), [&](const auto& entry) { return entry.at > killed; });
    if (!whole && next != steps.end()) seconds.push_back(next->at - killed);
    kills.count(ended);
  }
  std::sort(seconds.begin(), seconds.end());
  if (seconds.empty()) seconds.push_back(NAN);
  fmt::print("{}; from the kill of ranks to the end of the next step: median {:.0f} ms, slowest {:.0f} ms\n",
             kills.text(), seconds[seconds.size() / 2] * 1e3, seconds.back() * 1e3);
  EXPECT_GT(kills.all, 0);
}

}  // namespace shoal::test
