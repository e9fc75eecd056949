#include "comm/group/pending_work.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <thread>

#include "base/limits.h"
#include "comm/agreement/stuck_wait.h"
#include "comm/rendezvous/world_state.h"
#include "comm/transport/time_between_looks.h"
#include "shoal/detail/clock.h"
#include "shoal/error.h"

namespace shoal {
namespace {

constexpr Milliseconds patience_of_polls(100);
constexpr Milliseconds patience_with_ended(5000);
constexpr Milliseconds slice_of_waits(100);

// Peers on this host are known to be alive; peers on other hosts, and the links to them, may not be.
// missing: what the transport knows; may be empty.
std::string who_may_be_late(const GroupState& group, const std::string& missing) {
  const auto& peers = group.world->meeting.peers;
  std::vector<int> elsewhere;
  for (const int rank : group.world_ranks) {
    if (peers[rank].host != peers[group.world->placement.rank].host) elsewhere.push_back(rank);
  }
  if (!missing.empty()) {
    if (elsewhere.empty()) return missing;
    return fmt::format("{}; rank(s) {} on other hosts may not be reached", missing, fmt::join(elsewhere, ", "));
  }
  if (elsewhere.empty()) return "a rank is late, or does not call the same operations";
  return fmt::format(
      "a rank is late, does not call the same operations, or, as rank(s) {} on other hosts, cannot be reached",
      fmt::join(elsewhere, ", "));
}

}  // namespace

PendingWork::PendingWork(std::shared_ptr<GroupState> group, Call call, CallWatch watch)
    : group_(std::move(group)), call_(std::move(call)), watch_(watch), number_(group_->progress->issued.calls++) {
  group_->progress->issued.bytes += call_.bytes();
  group_->world->activity.seen();
  if (!is_message(call_)) collective_ = group_->progress->calls->enter(call_);
  try {
    work_ = group_->transport->issue(call_);
    watch_.issued(*group_);
  } catch (const Error&) {
    // A decorator's error: the transport below is intact and has not seen this call, so the next call takes its number.
    if (group_->world->recorder && !is_message(call_)) --group_->progress->collectives;
    if (!is_message(call_)) group_->progress->calls->take_back();
    throw;
  } catch (const std::exception& error) {
    fail_from(error);
  }
}

PendingWork::PendingWork(std::shared_ptr<GroupState> group, Call call, std::unique_ptr<TransportWork> work)
    : group_(std::move(group)),
      call_(std::move(call)),
      watch_(*group_, call_, /*published=*/true),
      number_(group_->progress->issued.calls),
      published_(true),
      work_(std::move(work)) {}

void wait_for(const std::shared_ptr<GroupState>& group, Call call, std::unique_ptr<TransportWork> work) {
  PendingWork(group, std::move(call), std::move(work)).wait();
}

PendingWork::~PendingWork() {
  if (!work_ || finished_ || group_->world->is_forked_copy() || !group_->progress->failure.text().empty()) return;
  if (std::uncaught_exceptions() > 0) {
    if (work_->done()) {
      watch_.finished(*group_, call_);
    } else {
      group_->progress->left_behind.push_back(std::move(work_));
    }
    return;
  }
  try {
    wait();
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the group's next call reports it
  }
}

// What a wait remembers from one slice to the next.
struct PendingWork::Waiting {
  Clock::time_point since;
  Clock::time_point deadline;
  StuckWait stuck;
  bool last_chance = false;  // a peer may have finished this operation and then ended normally
};

// What done() remembers.
struct PendingWork::Polling {
  Clock::time_point deadline;
  Clock::time_point next_look;  // at the peers
  std::optional<Clock::time_point> fault_since{};
};

// A failed operation counts as done, so that a program that polls it ends; wait() tells.
bool PendingWork::done() {
  if (finished_ || work_->done() || !group_->progress->failure.text().empty()) return true;
  const auto now = Clock::now();
  if (!polling_) polling_.reset(new Polling{.deadline = now + timeout(), .next_look = now + patience_of_polls});
  if (now < polling_->next_look) return false;
  polling_->next_look = now + patience_of_polls;
  const auto* watch = group_->world->watch.get();
  if (watch != nullptr && watch->raised()) return true;
  // A rank that has done its part may have ended while others have not.
  const bool faulty = fault_of_peers().has_value();
  if (!faulty) polling_->fault_since.reset();
  if (faulty && !polling_->fault_since) polling_->fault_since = now;
  if (faulty && now - *polling_->fault_since > patience_with_ended) return true;
  if (now < polling_->deadline) return false;
  if (!waiting_) waiting_.reset(new Waiting{now, now, stuck()});
  return true;
}

void PendingWork::wait() {
  if (finished_) return;
  const auto start = Clock::now();
  wait_to_the_end();
  watch_.finished(*group_, call_, start);
  group_->progress->waited_s += std::chrono::duration<double>(Clock::now() - start).count();
}

void PendingWork::wait_to_the_end() {
  const auto& while_waiting = group_->world->options.while_waiting;
  while (!wait_slice(slice_of_waits, /*to_the_end=*/true)) {
    if (while_waiting) while_waiting();
  }
}

bool PendingWork::wait_for(Milliseconds limit, bool to_the_end) {
  if (finished_) return true;
  const auto& while_waiting = group_->world->options.while_waiting;
  limit = std::clamp(limit, Milliseconds(0), longest_wait);
  const auto end = Clock::now() + limit;
  while (!wait_slice(std::min(limit, slice_of_waits), to_the_end)) {
    if (limit <= slice_of_waits) return false;
    limit = std::chrono::ceil<Milliseconds>(end - Clock::now());
    if (limit.count() <= 0) return false;
    if (while_waiting) while_waiting();
  }
  watch_.finished(*group_, call_);
  return true;
}

Milliseconds PendingWork::timeout() const {
  if (call_.timeout) return std::min(*call_.timeout, longest_wait);
  const Milliseconds of_group(group_->progress->timeout_ms.load());
  return of_group.count() > 0 ? std::min(of_group, longest_wait)
                              : std::chrono::seconds(group_->world->options.timeout_seconds);
}

void PendingWork::require_generation() {
  const auto* watch = group_->world->watch.get();
  if (watch == nullptr || !watch->raised()) return;
  const int rank = watch->broken_by();
  const auto why = watch->why();
  set_failure(*group_, why);
  const auto found = std::find(group_->world_ranks.begin(), group_->world_ranks.end(), rank);
  throw CommError(fmt::format("{} (noticed by rank {} in group '{}', operation #{}: {})", why,
                              group_->world->placement.rank, group_->name, number_, call_.describe()),
                  found == group_->world_ranks.end() ? -1 : static_cast<int>(found - group_->world_ranks.begin()));
}

std::optional<Fault> PendingWork::fault_of_peers() {
  auto& liveness = *group_->world->liveness;
  const int own = group_->world->placement.rank;
  std::vector<int> needed;
  // A message concerns its two ranks alone: others may have ended.
  if (is_message(call_)) {
    if (call_.peer >= 0) return liveness.check({group_->world_ranks[call_.peer]});
    needed = group_->world_ranks;
  } else {
    std::copy_if(group_->world_ranks.begin(), group_->world_ranks.end(), std::back_inserter(needed),
                 [&](int rank) { return rank != own && work_->needs(rank); });
    return liveness.check(needed);
  }
  // One from any source may come from every rank that is still there.
  std::optional<Fault> fault;
  for (const int rank : needed) {
    if (rank == own) continue;
    fault = liveness.check({rank});
    if (!fault) break;
  }
  return fault;
}

// A transport progresses its own operations while it is waited for; a peer may wait for another group first.
bool PendingWork::wait_for_transport(Milliseconds limit, Milliseconds left) {
  const auto& memory = group_->world->memory;
  if (!memory || group_->transport->name() == "host") return work_->wait_for(limit, left);
  const auto end = Clock::now() + limit;
  while (memory->in_flight()) {
    // Also in one short wait after the other.
    const auto brief =
        std::min(time_between_looks(Milliseconds(1), waiting_->since), std::max(limit / 4, Milliseconds(1)));
    if (Clock::now() + brief >= end) break;
    memory->poll();
    if (work_->wait_for(brief, left)) return true;
  }
  return work_->wait_for(std::max(std::chrono::floor<Milliseconds>(end - Clock::now()), Milliseconds(0)), left);
}

bool PendingWork::wait_slice(Milliseconds limit, bool to_the_end) {
  if (const auto failure = group_->progress->failure.text(); !failure.empty()) fail(-1, failure);
  auto& world = *group_->world;
  if (!waiting_) {
    world.activity.seen();
    const auto now = Clock::now();
    waiting_.reset(new Waiting{now, now + timeout(), stuck()});
  }
  auto& stuck = waiting_->stuck;
  constexpr Milliseconds last_slice(500);
  const auto left = std::chrono::ceil<Milliseconds>(waiting_->deadline - Clock::now());
  try {
    finished_ = wait_for_transport(waiting_->last_chance ? last_slice : std::clamp(left, Milliseconds(0), limit),
                                   std::max(left, Milliseconds(1)));
  } catch (const DisagreeError& error) {
    if (group_->progress->transport->checks_agreement()) disagree(error.what());
    fail_from(error);  // the error concerns some ranks, and a part of the operation
  } catch (const std::exception& error) {
    fail_from(error);
  }
  if (finished_) {
    stuck.finished();
    return true;
  }
  require_generation();
  if (const auto difference = stuck.look(to_the_end)) disagree(*difference);
  if (const auto fault = fault_of_peers()) {
    if (waiting_->last_chance) fail(fault->world_rank, fault->text);
    waiting_->last_chance = true;
  }
  if (Clock::now() >= waiting_->deadline) {
    const auto missing = work_->waits_for();
    fail(-1, fmt::format("not finished within the timeout of {} s although no peer of this host is dead or stopped: {}",
                         std::chrono::duration<double>(timeout()).count(), who_may_be_late(*group_, missing)));
  }
  return false;
}

int PendingWork::source() const {
  const int found = work_->source();
  return found == any_source && call_.op == Op::recv ? call_.peer : found;
}

StuckWait PendingWork::stuck() const {
  return {*group_, call_, published_ || is_message(call_) ? std::nullopt : std::optional(collective_)};
}

void PendingWork::fail_from(const std::exception& error) {
  require_generation();
  if (const auto* left = dynamic_cast<const Abandoned*>(&error)) fail(left->culprit(), error.what());
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  std::string text = torch_error != nullptr ? torch_error->what_without_backtrace() : error.what();
  text = text.substr(0, text.find('\n'));
  auto& liveness = *group_->world->liveness;
  auto stuck = this->stuck();
  // Ends with a look at the peers: the store's answer may take longer than all of this, if its server is stopped.
  for (const auto deadline = Clock::now() + Milliseconds(1500);;) {
    const bool last = Clock::now() >= deadline;
    if (const auto fault = liveness.check(group_->world_ranks)) fail(fault->world_rank, fault->text);
    require_generation();
    if (last) break;
    if (const auto difference = stuck.look_after_failure()) disagree(*difference);
    std::this_thread::sleep_for(Milliseconds(20));
  }
  if (dynamic_cast<const DisagreeError*>(&error) != nullptr) disagree(stuck.tell(text));
  if (const auto fault = liveness.first_failure()) fail(fault->world_rank, fault->text);
  if (const auto* lost = dynamic_cast<const PeerLost*>(&error)) {
    fail(lost->world_rank(), fmt::format("rank {} is gone: {}", lost->world_rank(), text));
  }
  fail(-1,
       fmt::format("the {} transport failed and no rank of this host is gone ({})", group_->transport->name(), text));
}

void PendingWork::abandon(const std::string& why, int culprit) {
  if (group_->world->watch) return;  // in an elastic job the ranks that go on give up the group together
  const bool names_rank = why.rfind("rank ", 0) == 0;
  const auto text = names_rank ? why : fmt::format("rank {} has failed: {}", group_->world->placement.rank, why);
  group_->progress->transport->abandon({text, culprit});
  // Threads of c10d's backends notice it a little later.
  const auto deadline = Clock::now() + Milliseconds(100);
  while (work_ && group_->progress->transport->joins_threads() && !work_->done() && Clock::now() < deadline) {
    std::this_thread::sleep_for(Milliseconds(1));
  }
}

void PendingWork::disagree(const std::string& difference) {
  set_failure(*group_, difference);
  // If the transport does not tell the other ranks, they read it from the store, which this rank may host.
  if (!group_->progress->transport->checks_agreement()) group_->world->liveness->stay_for_others();
  abandon(difference, -1);
  throw DisagreeError(
      fmt::format("{} (detected by rank {} in group '{}')", difference, group_->world->placement.rank, group_->name));
}

void PendingWork::fail(int rank, const std::string& why) {
  auto& state = *group_;
  if (state.progress->failure.text().empty()) {
    if (const auto difference = stuck().told()) disagree(*difference);
  }
  // In an elastic job this rank goes on, so others need not know why it has ended.
  if (set_failure(state, why) && !state.world->watch) {
    state.world->liveness->publish(rank, why.rfind("rank ", 0) == 0 ? why : fmt::format("a rank failed: {}", why));
    abandon(why, rank);
  }
  const auto found = std::find(state.world_ranks.begin(), state.world_ranks.end(), rank);
  throw CommError(fmt::format("{} (detected by rank {} in group '{}', operation #{}: {})", why,
                              state.world->placement.rank, state.name, number_, call_.describe()),
                  found == state.world_ranks.end() ? -1 : static_cast<int>(found - state.world_ranks.begin()));
}

}  // namespace shoal
