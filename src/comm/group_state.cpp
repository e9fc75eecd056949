#include "comm/group_state.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>

#include "comm/gloo.h"
#include "comm/identity.h"
#include "comm/mpi.h"
#include "comm/world_state.h"
#include "shoal/base/error.h"

namespace shoal {

// Operations that never finished keep a transport's threads busy; joining them would block until their deadline, so a
// failed group leaves its transport to the end of the process.
GroupProgress::~GroupProgress() {
  if (!failure.empty()) new std::shared_ptr<Transport>(std::move(transport));
}

std::vector<std::string> transport_names() {
  std::vector<std::string> names = {"auto", "gloo"};
  if (mpi_is_built()) names.emplace_back("mpi");
  return names;
}

std::shared_ptr<GroupState> make_group_state(std::shared_ptr<WorldState> world, std::string name,
                                             std::vector<int> world_ranks) {
  auto state = std::make_shared<GroupState>();
  const int world_rank = world->placement.rank;
  const auto found = std::find(world_ranks.begin(), world_ranks.end(), world_rank);
  state->rank = static_cast<int>(found - world_ranks.begin());
  state->name = std::move(name);
  state->world_ranks = std::move(world_ranks);
  state->world = std::move(world);
  state->progress = std::make_shared<GroupProgress>();
  if (state->world_ranks.size() == 1) {
    state->transport = make_identity_transport();
  } else if (state->world->options.transport == "mpi") {
    state->transport = make_mpi_transport(*state->world, state->world_ranks, state->rank);
  } else {
    state->transport =
        make_gloo_transport(*state->world, state->name, state->rank, static_cast<int>(state->world_ranks.size()));
  }
  state->progress->transport = state->transport;
  return state;
}

Group with_transport(const Group& group,
                     const std::function<std::shared_ptr<Transport>(std::shared_ptr<Transport>)>& wrap) {
  auto copy = std::make_shared<GroupState>(*group.state_);
  copy->transport = wrap(copy->transport);
  return Group(std::move(copy));
}

PendingWork::PendingWork(std::shared_ptr<GroupState> group, Call call)
    : group_(std::move(group)), call_(std::move(call)), number_(group_->progress->calls++) {
  try {
    work_ = group_->transport->issue(call_);
  } catch (const Error&) {
    throw;  // a decorator's own; the transport below is intact
  } catch (const std::exception& error) {
    fail_from(error);
  }
}

PendingWork::~PendingWork() {
  if (work_ && !finished_ && !work_->done() && group_->progress->failure.empty()) {
    group_->progress->failure = fmt::format("{} #{} was dropped before it had finished", call_.describe(), number_);
  }
}

bool PendingWork::done() {
  return finished_ || work_->done();
}

void PendingWork::wait() {
  if (finished_) return;
  if (!group_->progress->failure.empty()) fail(-1, group_->progress->failure);
  auto& world = *group_->world;
  const auto deadline = Clock::now() + std::chrono::seconds(world.options.timeout_seconds);
  constexpr Milliseconds slice(100);
  bool last_chance = false;  // a peer may have ended in order after its part of this operation
  while (true) {
    const auto remaining = std::chrono::duration_cast<Milliseconds>(deadline - Clock::now());
    try {
      finished_ = work_->wait_for(last_chance ? 5 * slice : slice, std::max(remaining, Milliseconds(1)));
    } catch (const std::exception& error) {
      fail_from(error);
    }
    if (finished_) return;
    if (const auto fault = world.liveness->check(group_->world_ranks)) {
      if (last_chance) fail(fault->world_rank, fault->text);
      last_chance = true;
    }
    if (remaining <= Milliseconds(0)) {
      fail(-1, fmt::format("not finished after {} s although no peer of this host is dead or stopped: a rank is late, "
                           "or does not call the same operations",
                           world.options.timeout_seconds));
    }
  }
}

void PendingWork::fail_from(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  std::string text = torch_error != nullptr ? torch_error->what_without_backtrace() : error.what();
  text = text.substr(0, text.find('\n'));
  const auto fault = group_->world->liveness->diagnose(group_->world_ranks);
  if (fault) fail(fault->world_rank, fault->text);
  fail(-1,
       fmt::format("the {} transport failed and no rank of this host is gone ({})", group_->transport->name(), text));
}

void PendingWork::fail(int rank, const std::string& why) {
  auto& state = *group_;
  if (state.progress->failure.empty()) {
    state.progress->failure = why;
    state.world->liveness->publish(why.rfind("rank ", 0) == 0 ? why : fmt::format("a rank failed: {}", why));
  }
  const auto found = std::find(state.world_ranks.begin(), state.world_ranks.end(), rank);
  throw CommError(fmt::format("{} (noticed by rank {} in group '{}', operation #{}: {})", why,
                              state.world->placement.rank, state.name, number_, call_.describe()),
                  found == state.world_ranks.end() ? -1 : static_cast<int>(found - state.world_ranks.begin()));
}

}  // namespace shoal
