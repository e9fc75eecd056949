#include "launch/ranks.h"

#include <sys/wait.h>

#include <algorithm>
#include <csignal>

namespace shoal {

bool Ranks::belongs(const Child& child, bool wait) const {
  return !newcomers_.is_one(child.rank) || newcomers_.is_member(child.rank, wait);
}

int64_t Ranks::alive() const {
  return std::count_if(children_.begin(), children_.end(), [](const Child& child) { return child.running; });
}

int Ranks::members() const {
  return static_cast<int>(std::count_if(children_.begin(), children_.end(),
                                        [&](const Child& child) { return child.running && belongs(child); }));
}

int64_t Ranks::not_failed() const {
  const auto here = std::count_if(children_.begin(), children_.end(),
                                  [&](const Child& child) { return !child.failed && belongs(child); });
  return here + first_ranks_ - (options_.join ? 0 : options_.ranks);
}

bool Ranks::go_on() const {
  if (given_up_) return false;
  // It cannot be told here who has joined on other nodes.
  const bool unknown = options_.nodes > 1 && options_.most_ranks > 0;
  const bool enough = unknown || not_failed() >= options_.min_ranks;
  return options_.keep_going || (options_.min_ranks > 0 && enough);
}

int Ranks::failed_joins() const {
  int count = 0;
  for (auto child = children_.rbegin(); child != children_.rend() && newcomers_.is_one(child->rank); ++child) {
    if (belongs(*child)) break;
    if (!child->running) ++count;
  }
  return count;
}

bool Ranks::pipes_open() const {
  return std::any_of(children_.begin(), children_.end(), [](const Child& child) {
    return std::any_of(child.pipes.begin(), child.pipes.end(), [](const LinePipe& pipe) { return pipe.open(); });
  });
}

std::vector<pid_t> Ranks::stop() const {
  std::vector<pid_t> groups;
  for (const auto& child : children_) {
    if (!child.running || child.stopped) continue;
    kill(-child.pid, SIGTSTP);  // which a launcher among them passes on
    groups.push_back(child.pid);
  }
  return groups;
}

void Ranks::signal_all(int signal, bool reap) {
  for (const auto& child : children_) {
    if (!child.running) continue;
    kill(-child.pid, signal);
    if (child.stopped) kill(-child.pid, SIGCONT);  // a stopped process would not see the signal
    if (reap) waitpid(child.pid, nullptr, 0);
  }
}

}  // namespace shoal
