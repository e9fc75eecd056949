#include "comm/group/group_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/limits.h"
#include "comm/agreement/fingerprint.h"
#include "comm/rendezvous/world_state.h"
#include "comm/transport/choose_transport.h"
#include "shoal/error.h"

namespace shoal {

// Leaks a failed group's transport until the process ends: operations that never finish keep its threads busy, and
// joining those would block until their deadline. A forked child leaks all: a thread of its parent may wait in them.
GroupProgress::~GroupProgress() {
  const bool forked = getpid() != pid;  // the threads are the parent's
  const bool busy = forked || !failure.text().empty() ||
                    std::any_of(left_behind.begin(), left_behind.end(), [](const auto& work) { return !work->done(); });
  if (!busy || (!forked && !transport->joins_threads())) return;
  for (auto& work : left_behind) static_cast<void>(work.release());
  new std::shared_ptr<Transport>(std::move(transport));
}

namespace {
constexpr const char* check_suffix = "/checks";
}  // namespace

bool compares_calls(const std::string& group) {
  return group.ends_with(check_suffix);
}

std::shared_ptr<GroupState> make_group_state(std::shared_ptr<WorldState> world, std::string name,
                                             std::vector<int> world_ranks, std::optional<Milliseconds> limit) {
  auto state = std::make_shared<GroupState>();
  const int world_rank = world->placement.rank;
  const auto found = std::find(world_ranks.begin(), world_ranks.end(), world_rank);
  state->rank = static_cast<int>(found - world_ranks.begin());
  state->name = std::move(name);
  state->world_ranks = std::move(world_ranks);
  state->world = std::move(world);
  state->progress = std::make_shared<GroupProgress>();
  state->transport = choose_transport(*state->world, state->name, state->rank, state->world_ranks,
                                      std::min(limit.value_or(state->world->rendezvous_limit()), longest_wait));
  state->progress->transport = state->transport;
  state->world->groups.add(state->progress);
  const bool is_check = compares_calls(state->name);
  const bool compares_later = state->world_ranks.size() > 1 && !state->transport->checks_agreement() && !is_check;
  state->world->activity.seen();  // this thread may give the group to one that has not made its first call yet
  state->progress->calls = state->world->activity.add_group(state->name, compares_later);
  if (auto* recorder = state->world->recorder.get()) {
    state->progress->flight_group = recorder->add_group(state->name, state->world_ranks, state->progress);
  }
  if (compares_later && state->world->options.check_agreement) {
    state->progress->checks = make_group_state(state->world, state->name + check_suffix, state->world_ranks, limit);
  }
  return state;
}

bool set_failure(const GroupState& state, const std::string& why) {
  if (auto* recorder = state.world->recorder.get()) recorder->failed(why);
  return state.progress->failure.set(why);
}

void check_agreement(const std::shared_ptr<GroupState>& state, const Call& call) {
  if (!state->progress->checks || is_message(call)) return;
  const Group checks(state->progress->checks);
  const auto own = fingerprint_of(call, state->progress->calls->entered());
  constexpr auto bytes = static_cast<int64_t>(sizeof own);
  auto all = at::empty({checks.size() * bytes}, at::kByte);
  auto mine = at::empty({bytes}, at::kByte);
  std::memcpy(mine.data_ptr(), &own, sizeof own);
  checks.all_gather(all, mine, call.label).wait();
  std::vector<const Fingerprint*> prints;
  for (int rank = 0; rank < checks.size(); ++rank) {
    prints.push_back(reinterpret_cast<const Fingerprint*>(all.data_ptr<uint8_t>() + rank * bytes));
  }
  const auto difference = find_difference(prints, state->world_ranks);
  if (!difference) return;
  set_failure(*state, *difference);
  throw DisagreeError(
      fmt::format("{} (detected by rank {} in group '{}')", *difference, state->world->placement.rank, state->name));
}

const std::shared_ptr<GroupState>& state_of(const Group& group) {
  return group.state_;
}

void note(const Group& group, const std::string& text) {
  const auto& state = *state_of(group);
  if (auto* recorder = state.world->recorder.get()) recorder->note(state.progress->flight_group, text);
}

void leave_group(const Group& group, const std::string& why) {
  const auto& state = *state_of(group);
  if (state.world->watch || state.world_ranks.size() == 1) return;
  const int own = state.world->placement.rank;
  const auto text = fmt::format("rank {} has failed: {}", own, why);
  if (!set_failure(state, text)) return;
  state.world->liveness->publish(own, text);
  state.progress->transport->abandon({text, own});
}

}  // namespace shoal
