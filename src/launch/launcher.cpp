#include "launch/launcher.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <optional>
#include <random>
#include <utility>

#include "base/environment.h"
#include "base/printable.h"
#include "comm/rendezvous/job_identity.h"
#include "comm/store/job_store.h"
#include "comm/telemetry/verdict.h"
#include "launch/child.h"
#include "launch/leftovers.h"
#include "launch/limits.h"
#include "launch/newcomers.h"
#include "launch/outlet.h"
#include "launch/rank_variables.h"
#include "launch/signals.h"
#include "launch/watcher.h"
#include "shoal/error.h"

namespace shoal {
namespace {

using SteadyClock = std::chrono::steady_clock;

constexpr int seconds_to_find_a_job = 30;
constexpr int interrupted_well = 130;  // exit code of a rank that has saved and ended after a signal

// Unique on all hosts. Within another job, it begins with that job's id.
std::string make_job_id() {
  const auto outer = process_environment()(job_variable);
  return fmt::format("{}{}-{:08x}", outer ? *outer + "/" : "", getpid(), std::random_device()());
}

// Of several nodes, the same on all.
std::string name_of_job(const std::string& address, int port) {
  return fmt::format("{}:{}", address, port);
}

// The ranks, from start to end.
class Job {
 public:
  // first_ranks: of all nodes.
  Job(const LaunchOptions& options, int first_ranks)
      : options_(options),
        first_ranks_(first_ranks),
        id_(make_job_id()),
        watcher_(id_),
        secret_(process_environment()("SHOAL_SECRET").value_or(options.nodes > 1 ? "" : random_secret())),
        store_(options.nodes, options.node, options.address, options.port),
        newcomers_(options, first_ranks, id_, store_) {}

  ~Job() { kill_all(SIGKILL, /*reap=*/true); }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  int run() {
    warn_of_strangers();
    for (int local = 0; local < options_.ranks; ++local) {
      options_.join ? newcomers_.ask("its host comes to the job") : start(options_.node * options_.ranks + local);
    }
    store_.open({.first_ranks = first_ranks_, .most_ranks = options_.most_ranks, .min_ranks = options_.min_ranks});
    // Its threads begin once all ranks are forked: a lock that one of them held would stay locked in a forked rank.
    store_.begin(JobIdentity(process_environment()("SHOAL_JOB_ID").value_or(run_id()), secret_));
    const auto runs = [this] { return alive() > 0 || newcomers_.asked() > 0; };
    do {
      while (runs()) step();
      store_.leave();
      while (!runs() && !store_.may_end() && !waits_no_more_) step();  // on node 0, a rank may be added meanwhile
    } while (runs());
    forward_the_rest();
    const bool failed_first = code_before_interrupt_.has_value();
    if (code_ && (!interrupted_ || failed_first)) print_verdict();
    forward_the_rest();
    if (interrupted_) return failed_first ? *code_before_interrupt_ : interrupted_well;
    if (const int error = out_.error() != 0 ? out_.error() : err_.error(); error != 0 && !code_) {
      throw UsageError(fmt::format("cannot write the output of the ranks: {}", std::strerror(error)));
    }
    const auto joined = [&](const Child& child) { return belongs(child); };
    if (options_.join && std::none_of(children_.begin(), children_.end(), joined)) return 1;
    return succeeded_ && failures_end_nothing() ? 0 : code_.value_or(0);
  }

 private:
  void warn_of_strangers() {
    if (options_.nodes == 1 || options_.node > 0) return;
    if (secret_.empty()) say("SHOAL_SECRET is not set: the ranks of different nodes do not authenticate each other");
    if (options_.address == LaunchOptions().address) {
      say("--address is {}, which other hosts do not reach: give an address or name of node 0", options_.address);
    }
  }

  void start(int rank) {
    const Outlets outlets{&out_, &err()};
    children_.push_back(start_child(rank, {options_.command, options_.body},
                                    rank_variables(options_, {rank, static_cast<int>(children_.size()), first_ranks_},
                                                   {run_id(), id_, secret_, store_.port()}, newcomers_),
                                    options_.prefix_output ? outlets : Outlets()));
    tell_watcher(&Watcher::add, children_.back().pid);
  }

  // A process that is to join the job. why: it is started, for people. Whether it is started, or will be.
  bool start_newcomer(const std::string& why) {
    const auto all = alive() + static_cast<int64_t>(newcomers_.asked()) + newcomers_.elsewhere();
    if (all >= options_.most_ranks) {
      say("no rank is added ({}): the job has {} processes, the most that --elastic allows", why, all);
      return false;
    }
    newcomers_.ask(why);
    return start_asked();
  }

  // One that cannot be started costs the job nothing.
  bool start_asked() {
    bool all = true;
    if (ending()) {
      for (const auto& why : newcomers_.drop()) say("no rank is added ({}): the job ends", why);
    }
    for (const auto& why : newcomers_.given_up()) {
      say("no rank is added ({})", why);
      all = false;
    }
    while (const auto one = newcomers_.next()) {
      const auto& [number, why] = *one;
      try {
        start(number);
        say("rank {} (pid {}) is started to join the job ({})", number, children_.back().pid, why);
      } catch (const UsageError& error) {
        say("no rank is added ({}): {}", why, error.what());
        all = false;
      }
    }
    return all;
  }

  // Whether the rank is one of the job's: a newcomer is once it was admitted.
  bool belongs(const Child& child, bool wait = false) {
    return !newcomers_.is_one(child.rank) || newcomers_.is_member(child.rank, wait);
  }

  // The same on all nodes.
  std::string run_id() const { return options_.nodes == 1 ? id_ : name_of_job(options_.address, store_.port()); }

  void tell_watcher(bool (Watcher::*tell)(pid_t) const, pid_t group) {
    if ((watcher_.*tell)(group) || std::exchange(watcher_has_ended_, true)) return;
    say("its process shoal-watcher has been killed; the ranks go on, but some may stay if this launcher is killed, "
        "too");
  }

  Outlet& err() { return one_stream_ ? out_ : err_; }

  template <class... Arguments>
  void say(fmt::format_string<Arguments...> text, Arguments&&... arguments) {
    err().add("shoal: " + fmt::format(text, std::forward<Arguments>(arguments)...) + "\n");
    err().drain();
  }

  // Forwards the remaining output. A slow reader gets all of it; after an interrupt it gets a moment only, because it
  // may have stopped. Descendants of ranks may keep the pipes open for any time, and are not waited for.
  void forward_the_rest() {
    const auto end = SteadyClock::now() + seconds(2);
    auto closing = SteadyClock::now() + seconds(0.3);
    while (!interrupted_ || SteadyClock::now() < end) {
      const auto now = SteadyClock::now();
      if (!out_.empty() || !err_.empty()) {
        closing = now + seconds(0.3);
      } else if (!pipes_open() || now > closing) {
        return;
      }
      step();
    }
  }

  void print_verdict() {
    if (options_.flight_recorder.empty()) return;
    try {
      for (const auto& sentence : verdict(read_flights({options_.flight_recorder}))) {
        say("{}", sentence);
      }
    } catch (const UsageError& error) {  // the ranks may have failed before they had a recorder
      say("{}", error.what());
    }
  }

  // Whether the other ranks go on in spite of the failures so far.
  bool failures_end_nothing() {
    const auto standing = std::count_if(children_.begin(), children_.end(),
                                        [&](const Child& child) { return !child.failed && belongs(child); });
    // Of other nodes nothing is known here: the ranks count themselves.
    const auto elsewhere = first_ranks_ - (options_.join ? 0 : options_.ranks);
    // Nor can it be told who has joined there.
    const bool unknown = options_.nodes > 1 && options_.most_ranks > 0;
    const bool enough = unknown || standing + elsewhere >= options_.min_ranks;
    return options_.keep_going || (options_.min_ranks > 0 && enough);
  }

  int members_here() {
    return static_cast<int>(std::count_if(children_.begin(), children_.end(),
                                          [&](const Child& child) { return child.running && belongs(child); }));
  }

  int64_t alive() const {
    return std::count_if(children_.begin(), children_.end(), [](const Child& child) { return child.running; });
  }

  bool pipes_open() const {
    return std::any_of(children_.begin(), children_.end(), [](const Child& child) {
      return std::any_of(child.pipes.begin(), child.pipes.end(), [](const LinePipe& pipe) { return pipe.open(); });
    });
  }

  void step() {
    std::vector<pollfd> waits = {{signals_.fd(), POLLIN, 0}};
    std::vector<LinePipe*> pipes;
    for (auto& child : children_) {
      for (auto& pipe : child.pipes) {
        if (!pipe.ready()) continue;
        waits.push_back({pipe.fd(), POLLIN, 0});
        pipes.push_back(&pipe);
      }
    }
    for (auto* outlet : {&out_, &err_}) {
      if (!outlet->empty()) waits.push_back({outlet->fd(), POLLOUT, 0});
    }
    poll(waits.data(), waits.size(), 100);
    for (size_t i = 0; i < pipes.size(); ++i) {
      if (waits[i + 1].revents != 0) pipes[i]->pump();
    }
    out_.drain();
    err_.drain();
    const auto asked = signals_.asked();
    if (asked.to_stop > 0) interrupt(asked.to_stop);
    if (asked.who_waits) print_verdict();
    reap();
    if (options_.nodes > 1) store_.set_members(members_here());
    look_at_other_nodes();
    if (asked.more) add_rank();
    start_asked();
    end_late_newcomers();
    end_overdue();
    enforce_deadlines();
  }

  void look_at_other_nodes() {
    if (term_at_ || interrupted_ || alive() == 0) return;
    const auto why = store_.failure_elsewhere();
    if (why.empty() || options_.keep_going) return;
    if (std::exchange(told_of_others_, true)) return;
    if (!code_) code_ = 1;
    say("the job ends, because on another node {}", printable(why));
    term_at_ = after(options_.grace_seconds);
  }

  void add_rank() {
    if (!newcomers_.possible()) return say("SIGUSR2 adds a rank to a job of --elastic MIN:MAX, which this is not");
    if (ending()) return say("SIGUSR2 comes when the job ends: no rank is added");
    start_newcomer("SIGUSR2; several that come together count once");
  }

  // Whether nobody needs to join any more.
  bool ending() { return interrupted_ || succeeded_ || term_at_ || !failures_end_nothing(); }

  // Those that wait to join a job of which nobody runs any more.
  void end_late_newcomers() {
    const bool runs = std::any_of(children_.begin(), children_.end(),
                                  [&](const Child& child) { return child.running && belongs(child); });
    if (!newcomers_.possible() || runs || !newcomers_.too_late()) return;
    for (auto& child : children_) {
      if (!child.running || child.late) continue;
      child.late = true;
      kill(-child.pid, SIGKILL);
      say("rank {} (pid {}) was to join a job that has ended", child.rank, child.pid);
    }
  }

  // Ranks that stand still, as those of other hosts have found.
  void end_overdue() {
    for (const int rank : store_.overdue()) {
      for (const auto& child : children_) {
        if (child.rank == rank && child.running) kill(-child.pid, SIGKILL);
      }
    }
  }

  void reap() {
    std::vector<int> replaced;
    for (auto& child : children_) {
      int status = 0;
      if (!child.running || waitpid(child.pid, &status, WNOHANG | WUNTRACED | WCONTINUED) != child.pid) continue;
      if (WIFSTOPPED(status) || WIFCONTINUED(status)) {
        note_stop(child, status);
        continue;
      }
      child.running = false;
      kill(-child.pid, SIGKILL);  // ends its descendants
      tell_watcher(&Watcher::remove, child.pid);
      store_.report_end(child.rank);
      if (child.late) continue;
      const bool belonged = belongs(child, /*wait=*/true);
      succeeded_ = succeeded_ || (status == 0 && belonged);
      // After the failure that has ended the job, the others' are its consequences.
      const bool consequence = code_ && !failures_end_nothing();
      child.failed = status != 0;
      if (status == 0 && !belonged && !ending()) {
        say("rank {} (pid {}) ended, and has not joined the job", child.rank, child.pid);
      }
      if (status == 0 || consequence) continue;
      const auto text = fmt::format("rank {} {}{}", child.rank, describe_end(status),
                                    belonged ? "" : " before it had joined the job");
      if (!belonged) {
        if (!interrupted_) say("{} (pid {})", text, child.pid);
        replaced.push_back(child.rank);
        continue;
      }
      if (!code_) code_ = exit_code(status);
      if (!failures_end_nothing()) store_.report_failure(text);
      if (!interrupted_) say("{} (pid {})", text, child.pid);
      if (!term_at_ && !interrupted_ && !failures_end_nothing()) term_at_ = after(options_.grace_seconds);
      if (exit_code(status) != interrupted_well) replaced.push_back(child.rank);
    }
    for (const int rank : replaced) replace(rank);
  }

  void replace(int rank) {
    if (!newcomers_.possible() || restarts_ == options_.max_restarts || ending()) return;
    // As after an error that has ended the whole job.
    if (options_.nodes > 1 && members_here() == 0 && newcomers_.elsewhere() == 0) return;
    if (failed_joins() >= most_failed_joins) {
      say("rank {} is not replaced: the last {} ranks that were started ended before they had joined the job", rank,
          most_failed_joins);
      return;
    }
    const auto why = fmt::format("in place of rank {}, restart {} of {}", rank, restarts_ + 1, options_.max_restarts);
    if (start_newcomer(why)) ++restarts_;
  }

  // How many of the last newcomers ended without having joined, in a row.
  int failed_joins() {
    int count = 0;
    for (auto child = children_.rbegin(); child != children_.rend() && newcomers_.is_one(child->rank); ++child) {
      if (belongs(*child)) break;
      if (!child->running) ++count;
    }
    return count;
  }

  // Reported, because the other ranks wait for it and nothing else would tell why.
  void note_stop(Child& child, int status) {
    child.stopped = WIFSTOPPED(status);
    if (!child.stopped) return;
    say("rank {} (pid {}) was stopped by {}; continue it with kill -CONT {}", child.rank, child.pid,
        in_words(WSTOPSIG(status)), child.pid);
  }

  // The first interrupt lets the ranks end on their own, the second one kills them.
  void interrupt(int count) {
    kill_all(interrupted_ || count > 1 ? SIGKILL : SIGINT, false);
    // A job that ends because of a failure ends no later, and not well.
    if (!interrupted_ && !failures_end_nothing()) code_before_interrupt_ = code_;
    const auto stop_at = after(options_.stop_seconds);
    if (!term_at_ || interrupted_ || (stop_at && *stop_at < *term_at_)) term_at_ = stop_at;
    interrupted_ = true;
    waits_no_more_ = alive() == 0;
  }

  void enforce_deadlines() {
    const auto now = SteadyClock::now();
    if (kill_at_ && now > *kill_at_) kill_all(SIGKILL, false);
    if (!term_at_ || now < *term_at_ || kill_at_) return;
    kill_all(SIGTERM, false);
    kill_at_ = now + seconds(2);
  }

  void kill_all(int signal, bool reap) {
    for (auto& child : children_) {
      if (!child.running) continue;
      kill(-child.pid, signal);
      if (child.stopped) kill(-child.pid, SIGCONT);  // a stopped process would not see the signal
      if (reap) waitpid(child.pid, nullptr, 0);
    }
  }

  static SteadyClock::duration seconds(double count) {
    return std::chrono::duration_cast<SteadyClock::duration>(std::chrono::duration<double>(count));
  }

  // Nothing: never.
  static std::optional<SteadyClock::time_point> after(double count) {
    constexpr double years = 1e8;  // a longer time would overflow the clock
    return count < years ? std::optional(SteadyClock::now() + seconds(count)) : std::nullopt;
  }

  static constexpr int most_failed_joins = 3;  // in a row, before no rank is replaced any more

  const LaunchOptions& options_;
  const int first_ranks_;
  Signals signals_;
  Outlet out_{STDOUT_FILENO};
  Outlet err_{STDERR_FILENO};
  const bool one_stream_ = same_stream(STDOUT_FILENO, STDERR_FILENO);  // then all output goes to out_, line by line
  const std::string id_;
  const Watcher watcher_;  // made before there are threads
  const std::string secret_;
  JobStore store_;
  Newcomers newcomers_;
  std::vector<Child> children_;
  int restarts_ = 0;
  std::optional<int> code_;  // exit code of the first failure
  bool succeeded_ = false;   // of any rank
  bool interrupted_ = false;
  std::optional<int> code_before_interrupt_;
  bool told_of_others_ = false;
  bool waits_no_more_ = false;  // for other nodes
  bool watcher_has_ended_ = false;
  std::optional<SteadyClock::time_point> term_at_;
  std::optional<SteadyClock::time_point> kill_at_;
};

}  // namespace

int launch(const LaunchOptions& options) {
  options.validate();
  auto how = options;
  int first_ranks = options.ranks * options.nodes;
  if (options.join) {
    const auto environment = process_environment();
    const JobIdentity identity(environment("SHOAL_JOB_ID").value_or(name_of_job(options.address, options.port)),
                               environment("SHOAL_SECRET").value_or(""));
    const auto job = JobStore::find(options.address, options.port, identity, seconds_to_find_a_job);
    how.node = job.node;
    how.nodes = job.node + 1;
    how.most_ranks = job.most_ranks;
    how.min_ranks = job.min_ranks;
    first_ranks = job.first_ranks;
  }
  const int restarts = std::min(how.max_restarts, JoinTable::most_members);  // there are no more numbers
  require_open_files(std::max(how.ranks, how.most_ranks) + restarts);
  return Job(how, first_ranks).run();
}

}  // namespace shoal
