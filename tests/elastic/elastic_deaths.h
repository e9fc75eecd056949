#pragma once
// Trainings in which ranks end as they are told, and what must be so afterwards.

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/elastic/elastic_gossip_judge.h"
#include "tests/elastic/elastic_run.h"

namespace shoal::test {

inline std::string verdict_on(const Record& record, int epochs, bool in_rank_order, const Trained& trained) {
  if (trained.sharding == Sharding::gossip) return GossipJudge(record, trained).verdict(epochs);
  return judge(record, epochs, in_rank_order, trained);
}

// Checks that these ranks were killed and no others, that the others ended well, and what the judge says.
inline void check(const std::vector<RankEnded>& ended, const std::vector<int>& may_be_killed, const Record& record,
                  int epochs, bool in_rank_order = true, const Trained& trained = {}) {
  int left = 0;
  for (size_t rank = 0; rank < ended.size(); ++rank) {
    const bool killed = WIFSIGNALED(ended[rank].status);
    if (killed) {
      EXPECT_EQ(WTERMSIG(ended[rank].status), SIGKILL) << "rank " << rank << " hung or crashed";
      EXPECT_TRUE(std::count(may_be_killed.begin(), may_be_killed.end(), rank) == 1) << "rank " << rank;
      continue;
    }
    ++left;
    EXPECT_EQ(ended[rank].text, "") << "rank " << rank;
    EXPECT_EQ(record.evaluations[rank].load(), epochs) << "rank " << rank;
  }
  if (left > 0) {
    // In a process of its own, because one that has run backward must not fork.
    const auto verdict =
        run_ranks(1, [&](const World&) { return verdict_on(record, epochs, in_rank_order, trained); }).front();
    EXPECT_TRUE(WIFEXITED(verdict.status));
    EXPECT_EQ(verdict.text, "");
  }
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1) << "a process is left";
}

// For ranks that stand still and that nobody has killed: another signal ends them after 25 s.
inline void end_standing(const std::vector<pid_t>& pids) {
  const auto lives = [](pid_t pid) {
    siginfo_t info{};
    return waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == 0;
  };
  for (int i = 0; i < 2500 && std::any_of(pids.begin(), pids.end(), lives); ++i) usleep(10'000);
  for (const auto pid : pids) {
    if (!lives(pid)) continue;
    kill(pid, SIGABRT);
    kill(pid, SIGCONT);
  }
}

inline void die_at(int ranks, const std::vector<Death>& deaths, int epochs = 1, const WorldOptions& options = {},
                   const Trained& trained = {}, const ElasticOptions& chosen = {}) {
  const SharedRecord record;
  const auto ended = run_ranks(
      ranks, [&](const World& world) { return train(world, *record, epochs, deaths, chosen, trained); }, end_standing,
      options);
  std::vector<int> victims;
  for (const auto& death : deaths) {
    victims.push_back(death.rank);
    if (death.moment == Moment::on_notice) continue;  // it may notice it elsewhere
    EXPECT_TRUE(WIFSIGNALED(ended[death.rank].status)) << "rank " << death.rank << " did not come to its end";
  }
  check(ended, victims, *record, epochs, options.transport != "gloo", trained);
}

}  // namespace shoal::test
