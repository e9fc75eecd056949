#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>
#include <vector>

#include "base/limits.h"
#include "comm/membership/join_board.h"
#include "launch/launcher.h"
#include "shoal/error.h"

namespace shoal {

void LaunchOptions::validate() const {
  std::vector<std::string> faults;
  if (ranks < 1) faults.push_back(fmt::format("{} ranks: give at least 1", ranks));
  if (ranks > max_ranks) faults.push_back(fmt::format("{} ranks: give at most {}", ranks, max_ranks));
  if (command.empty() && !body) faults.emplace_back("no program to start");
  if (!command.empty() && body) faults.emplace_back("a command and a body: give one of them");
  if (nodes < 1) {
    faults.push_back(fmt::format("{} nodes: give at least 1", nodes));
  } else if (node < 0 || node >= nodes) {
    faults.push_back(fmt::format("node {} of {}: give 0 to the number of nodes less 1", node, nodes));
  } else if (nodes > max_ranks || int64_t{ranks} * nodes > max_ranks) {
    faults.push_back(fmt::format("{} nodes of {} ranks: give at most {} ranks in all", nodes, ranks, max_ranks));
  } else if (ranks >= 1 && (min_ranks < 0 || min_ranks > ranks * nodes)) {
    faults.push_back(fmt::format("at least {} ranks of {}: give 1 to {}", min_ranks, ranks * nodes, ranks * nodes));
  }
  if (keep_going && min_ranks != 0) {
    faults.emplace_back(
        "--keep-going goes on with any number of ranks, and --elastic with at least MIN: give one of them");
  }
  if (nodes > 1 && port == 0) faults.emplace_back("several nodes: give all launchers the same port");
  if (join && (nodes != 1 || node != 0))
    faults.emplace_back("a node that joins gets its number from the job: leave it out");
  if (join && port == 0) faults.emplace_back("a node that joins: give the job's address and port");
  if (join && (min_ranks != 0 || most_ranks != 0)) {
    faults.emplace_back("a node that joins: leave the limits of ranks out, which are the job's");
  }
  if (most_ranks != 0 &&
      (most_ranks < int64_t{ranks} * nodes || most_ranks > JoinTable::most_members || min_ranks == 0)) {
    faults.push_back(
        fmt::format("up to {0} ranks in an elastic job that begins with {1}: give {1} to {2}, and the least",
                    most_ranks, int64_t{ranks} * nodes, JoinTable::most_members));
  }
  if ((most_ranks != 0 || join) && body) faults.emplace_back("newcomers of an elastic job need a command, not a body");
  if (max_restarts < 0 || (max_restarts > 0 && most_ranks == 0 && !join)) {
    faults.push_back(
        fmt::format("--max-restarts {}: give 0 or more, with --elastic MIN:MAX, so that ranks may join", max_restarts));
  }
  if (port < 0 || port > 65535) faults.push_back(fmt::format("port {}: 0 (any free one) to 65535", port));
  if (threads < 0 || threads > max_threads) {
    faults.push_back(fmt::format("{} threads: give 1 to {}, or 0 to leave them alone", threads, max_threads));
  }
  if (!(grace_seconds >= 0)) faults.push_back(fmt::format("{} seconds of grace: give 0 or more", grace_seconds));
  if (!(stop_seconds >= 0)) faults.push_back(fmt::format("{} seconds to stop in: give 0 or more", stop_seconds));
  if (!faults.empty()) throw UsageError(fmt::format("launch: {}", fmt::join(faults, "; ")));
}

}  // namespace shoal
