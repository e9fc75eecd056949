#include "launch/job.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "base/environment.h"
#include "base/printable.h"
#include "comm/rendezvous/job_identity.h"
#include "comm/telemetry/verdict.h"
#include "launch/child.h"
#include "launch/leftovers.h"
#include "launch/rank_variables.h"
#include "shoal/error.h"

namespace shoal {
namespace {

constexpr int most_failed_joins = 3;  // in a row, before no rank is replaced any more

// Unique on all hosts. Within another job, it begins with that job's id.
std::string make_job_id() {
  const auto outer = process_environment()(job_variable);
  return fmt::format("{}{}-{:08x}", outer ? *outer + "/" : "", getpid(), std::random_device()());
}

}  // namespace

std::string name_of_job(const std::string& address, int port) {
  return fmt::format("{}:{}", address, port);
}

Job::Job(const LaunchOptions& options, int first_ranks)
    : options_(options),
      first_ranks_(first_ranks),
      id_(make_job_id()),
      watcher_(id_),
      secret_(process_environment()("SHOAL_SECRET").value_or(options.nodes > 1 ? "" : random_secret())),
      store_(options.nodes, options.node, options.address, options.port),
      newcomers_(options, first_ranks, id_, store_),
      ranks_(options, first_ranks, newcomers_) {}

Job::~Job() {
  ranks_.signal_all(SIGKILL, /*reap=*/true);
}

int Job::run() {
  warn_of_strangers();
  for (int local = 0; local < options_.ranks; ++local) {
    options_.join ? newcomers_.ask("its host comes to the job") : start(options_.node * options_.ranks + local);
  }
  store_.open({.first_ranks = first_ranks_, .most_ranks = options_.most_ranks, .min_ranks = options_.min_ranks});
  // Its threads begin once all ranks are forked: a lock that one of them held would stay locked in a forked rank.
  store_.begin(JobIdentity(process_environment()("SHOAL_JOB_ID").value_or(run_id()), secret_));
  const auto runs = [this] { return ranks_.alive() > 0 || newcomers_.asked() > 0; };
  do {
    while (runs()) step();
    store_.leave();
    while (!runs() && !store_.may_end() && !waits_no_more_) step();  // on node 0, a rank may be added meanwhile
  } while (runs());
  forward_the_rest();
  // The last ranks may have been killed, and have said nothing.
  const int code = code_.value_or(0);
  const bool killed = code > 128 && code != Interruption::ended_well;
  if (options_.min_ranks > 0 && !interruption_.began() && killed && !ranks_.given_up() && ranks_.not_failed() == 0) {
    output_.say("no rank is left, so the job and all shards of its state are lost{}",
                options_.when_lost ? options_.when_lost() : "");
  }
  if (succeeded_ && last_failure_ && ranks_.go_on() && !interruption_.began()) {
    output_.say("no rank has ended well since then: whatever was left to train or to save is lost");
  }
  if (code_ && (!interruption_.began() || interruption_.after_failure())) print_verdict();
  forward_the_rest();
  return result();
}

int Job::result() const {
  const bool stopped = interruption_.began();
  if (stopped && !(unread_ && interruption_.code() == Interruption::ended_well)) return interruption_.code();
  if (const int error = output_.error(); error != 0 && options_.prefix_output && (stopped || !code_)) {
    throw UsageError(fmt::format("cannot write the output of the ranks: {}", std::strerror(error)));
  }
  const auto joined = [&](const Child& child) { return ranks_.belongs(child); };
  const auto& children = ranks_.children();
  if (options_.join && std::none_of(children.begin(), children.end(), joined)) return 1;
  if (!succeeded_ || !ranks_.go_on()) return code_.value_or(0);
  return last_failure_.value_or(0);
}

void Job::warn_of_strangers() {
  if (options_.nodes == 1 || options_.node > 0) return;
  if (secret_.empty())
    output_.say("SHOAL_SECRET is not set: the ranks of different nodes do not authenticate each other");
  if (options_.address == LaunchOptions().address) {
    output_.say("--address is {}, which other hosts do not reach: give an address or name of node 0", options_.address);
  }
}

void Job::start(int rank) {
  const auto place = static_cast<int>(ranks_.children().size());
  auto child = start_child(
      rank, {options_.command, options_.body},
      rank_variables(options_, {rank, place, first_ranks_}, {run_id(), id_, secret_, store_.port()}, newcomers_),
      options_.prefix_output ? output_.outlets() : Outlets());
  ranks_.children().push_back(std::move(child));
  tell_watcher(&Watcher::add, ranks_.children().back().pid);
}

// A process that is to join the job. why: it is started, for people. Whether it is started, or will be.
bool Job::start_newcomer(const std::string& why) {
  const auto all = ranks_.alive() + static_cast<int64_t>(newcomers_.asked()) + newcomers_.elsewhere();
  if (all >= options_.most_ranks) {
    output_.say("no rank is added ({}): the job has {} processes, the most that --elastic allows", why, all);
    return false;
  }
  newcomers_.ask(why);
  return start_asked();
}

// One that cannot be started costs the job nothing.
bool Job::start_asked() {
  bool all = true;
  if (ending()) {
    for (const auto& why : newcomers_.drop()) output_.say("no rank is added ({}): the job ends", why);
  }
  for (const auto& why : newcomers_.given_up()) {
    output_.say("no rank is added ({})", why);
    all = false;
  }
  while (const auto one = newcomers_.next()) {
    const auto& [number, why] = *one;
    try {
      start(number);
      output_.say("rank {} (pid {}) is started to join the job ({})", number, ranks_.children().back().pid, why);
    } catch (const UsageError& error) {
      output_.say("no rank is added ({}): {}", why, error.what());
      all = false;
    }
  }
  return all;
}

void Job::add_rank() {
  if (!newcomers_.possible())
    return output_.say("SIGUSR2 adds a rank to a job of --elastic MIN:MAX, which this is not");
  if (ending()) return output_.say("SIGUSR2 comes when the job ends: no rank is added");
  start_newcomer("SIGUSR2; several that come together count once");
}

void Job::replace(int rank) {
  if (!newcomers_.possible() || restarts_ == options_.max_restarts || ending()) return;
  // As after an error that has ended the whole job.
  if (options_.nodes > 1 && ranks_.members() == 0 && newcomers_.elsewhere() == 0) return;
  if (ranks_.failed_joins() >= most_failed_joins) {
    output_.say(
        "rank {} is not replaced: the last {} ranks that were started have not joined the job, or have left it again",
        rank, most_failed_joins);
    return;
  }
  const auto why = fmt::format("in place of rank {}, restart {} of {}", rank, restarts_ + 1, options_.max_restarts);
  if (start_newcomer(why)) ++restarts_;
}

// Whether nobody needs to join any more.
bool Job::ending() const {
  return interruption_.began() || succeeded_ || stop_times_.set() || !ranks_.go_on();
}

// The same on all nodes.
std::string Job::run_id() const {
  return options_.nodes == 1 ? id_ : name_of_job(options_.address, store_.port());
}

void Job::tell_watcher(bool (Watcher::*tell)(pid_t) const, pid_t group) {
  if ((watcher_.*tell)(group) || std::exchange(watcher_has_ended_, true)) return;
  output_.say(
      "its process shoal-watcher has been killed; the ranks go on, but some may stay if this launcher is killed, "
      "too");
}

void Job::step() {
  std::vector<pollfd> waits = {{signals_.fd(), POLLIN, 0}};
  std::vector<LinePipe*> pipes;
  for (auto& child : ranks_.children()) {
    for (auto& pipe : child.pipes) {
      if (!pipe.ready()) continue;
      waits.push_back({pipe.fd(), POLLIN, 0});
      pipes.push_back(&pipe);
    }
  }
  output_.wait_for(waits);
  poll(waits.data(), waits.size(), 100);
  for (size_t i = 0; i < pipes.size(); ++i) {
    if (waits[i + 1].revents != 0) pipes[i]->pump();
  }
  output_.drain();
  const auto asked = signals_.asked();
  if (asked.to_stop || asked.hung_up) interrupt(asked);
  look_for_reader();  // after Ctrl-C, which may have ended it, too
  if (asked.to_suspend) suspend();
  if (asked.who_waits && options_.flight_recorder.empty()) {
    output_.say("who waits for whom is in the flight recorders of the ranks, which need --flight-recorder FOLDER");
  } else if (asked.who_waits) {
    print_verdict();
  }
  reap();
  if (options_.nodes > 1) store_.set_members(ranks_.members());
  look_at_other_nodes();
  look_for_loss();
  if (asked.more) add_rank();
  start_asked();
  end_late_newcomers();
  end_overdue();
  end_late();
}

void Job::look_at_other_nodes() {
  if (stop_times_.set() || interruption_.began() || ranks_.alive() == 0) return;
  const auto why = store_.failure_elsewhere();
  if (why.empty() || options_.keep_going) return;
  if (std::exchange(told_of_others_, true)) return;
  if (!code_) code_ = 1;
  output_.say("the job ends, because on another node {}", printable(why));
  stop_times_.give(options_.grace_seconds);
}

// Ranks that have given an elastic job up end, and those for which they have waited would stay.
void Job::look_for_loss() {
  if (options_.min_ranks == 0 || stop_times_.set() || interruption_.began() || ranks_.alive() == 0) return;
  const bool all_run = ranks_.alive() == static_cast<int64_t>(ranks_.children().size());
  if (options_.nodes == 1 && all_run) return;  // nobody has given it up, and the store is not asked each time
  const auto why = store_.lost();
  if (why.empty()) return;
  if (!code_) code_ = 1;
  ranks_.give_up();
  output_.say("the job is lost: {}", printable(why));
  stop_times_.give(options_.grace_seconds);
}

// Those that wait to join a job of which nobody runs any more.
void Job::end_late_newcomers() {
  if (!newcomers_.possible() || ranks_.members() > 0 || !newcomers_.too_late()) return;
  for (auto& child : ranks_.children()) {
    if (!child.running || child.late) continue;
    child.late = true;
    kill(-child.pid, SIGKILL);
    output_.say("rank {} (pid {}) was to join a job that has ended", child.rank, child.pid);
  }
}

// Ranks that stand still, as those of other hosts have found.
void Job::end_overdue() {
  for (const int rank : store_.overdue()) {
    for (const auto& child : ranks_.children()) {
      if (child.rank == rank && child.running) kill(-child.pid, SIGKILL);
    }
  }
}

void Job::reap() {
  std::vector<std::pair<Child*, int>> ended;
  for (auto& child : ranks_.children()) {
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
    if (!child.late) ended.emplace_back(&child, status);
  }
  // Those that have ended well have gone on without those that have failed meanwhile.
  std::stable_partition(ended.begin(), ended.end(), [](const auto& one) { return one.second != 0; });
  std::vector<int> replaced;
  for (const auto& [child, status] : ended) {
    if (note_end(*child, status)) replaced.push_back(child->rank);
  }
  for (const int rank : replaced) replace(rank);
  if (getpid() == 1) reap_orphans();
}

// Descendants of ranks whose parents have ended become children of the first process of a container.
void Job::reap_orphans() {
  siginfo_t found{};
  while (waitid(P_ALL, 0, &found, WEXITED | WNOHANG | WNOWAIT) == 0 && found.si_pid != 0) {
    const auto known = [&](const Child& child) { return child.running && child.pid == found.si_pid; };
    const auto& children = ranks_.children();
    if (std::any_of(children.begin(), children.end(), known)) return;  // the next reap() sees it
    found.si_pid == watcher_.pid() ? watcher_.reap() : void(waitpid(found.si_pid, nullptr, 0));
    found.si_pid = 0;
  }
}

// Whether another one may take its place.
bool Job::note_end(Child& child, int status) {
  const bool belonged = ranks_.belongs(child, /*wait=*/true);
  if (status == 0 && belonged) {
    succeeded_ = true;
    last_failure_.reset();
  }
  // After the failure that has ended the job, the others' are its consequences.
  const bool consequence = code_ && !ranks_.go_on();
  child.failed = status != 0;
  if (interruption_.began() && belonged) note_interrupted_end(child, status);
  const bool left = !belonged && newcomers_.has_left(child.rank);
  if (status == 0 && !belonged && !ending()) {
    output_.say("rank {} (pid {}) {}", child.rank, child.pid,
                left ? "ended, and has left the job again" : "ended, and has not joined the job");
  }
  if (status == 0 || consequence) return false;
  const auto* when = belonged ? "" : left ? " after it had left the job again" : " before it had joined the job";
  const auto text = fmt::format("rank {} {}{}", child.rank, describe_end(status), when);
  const auto tell = [&] {
    if (!interruption_.began()) output_.say("{} (pid {})", text, child.pid);
  };
  if (!belonged) {
    tell();
    return true;
  }
  if (!code_) code_ = exit_code(status);
  if (options_.min_ranks > 0 && exit_code(status) != Interruption::ended_well) last_failure_ = exit_code(status);
  if (!ranks_.go_on()) store_.report_failure(text);
  tell();
  if (!stop_times_.set() && !interruption_.began() && !ranks_.go_on()) {
    const auto left = ranks_.not_failed();
    if (options_.min_ranks > 0 && left > 0) {
      output_.say("{} left, and --elastic wants {}: the job ends",
                  left == 1 ? "1 rank is" : fmt::format("{} ranks are", left), options_.min_ranks);
    }
    stop_times_.give(options_.grace_seconds);
  }
  return exit_code(status) != Interruption::ended_well;
}

// Reported, because the other ranks wait for it and nothing else would tell why.
void Job::note_stop(Child& child, int status) {
  child.stopped = WIFSTOPPED(status);
  if (!child.stopped) return;
  output_.say("rank {} (pid {}) was stopped by {}; continue it with kill -CONT {}", child.rank, child.pid,
              in_words(WSTOPSIG(status)), child.pid);
}

// Forwards the remaining output. A slow reader gets all of it; after an interrupt it gets a moment only, because it
// may have stopped. Descendants of ranks may keep the pipes open for any time, and are not waited for.
void Job::forward_the_rest() {
  const auto end = Clock::now() + StopTimes::seconds(2);
  auto closing = Clock::now() + StopTimes::seconds(0.3);
  while (!interruption_.began() || Clock::now() < end) {
    const auto now = Clock::now();
    if (!output_.empty()) {
      closing = now + StopTimes::seconds(0.3);
    } else if (!ranks_.pipes_open() || now > closing) {
      return;
    }
    step();
  }
}

void Job::print_verdict() {
  if (options_.flight_recorder.empty()) return;
  try {
    auto flights = read_flights({options_.flight_recorder});
    const auto began = std::chrono::nanoseconds(began_.time_since_epoch()).count();
    const auto is_of_earlier_job = [&](const Flight& flight) {  // other hosts have other clocks
      return flight.state && !flight.records.empty() && flight.records.back().entered < began;
    };
    std::erase_if(flights, is_of_earlier_job);
    if (flights.empty()) throw UsageError(options_.flight_recorder + ": no rank of this job has a flight recorder yet");
    for (const auto& sentence : verdict(flights)) output_.say("{}", sentence);
  } catch (const UsageError& error) {  // the ranks may have failed before they had a recorder
    output_.say("{}", error.what());
  }
}

}  // namespace shoal
