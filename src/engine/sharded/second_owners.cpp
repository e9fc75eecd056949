#include "engine/sharded/second_owners.h"

#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <unordered_map>
#include <utility>

#include "comm/group/rank_groups.h"
#include "engine/changes/former_values.h"
#include "engine/sharded/second_owner_check.h"
#include "engine/sharded/sharded_optimizer_state.h"
#include "memory/views.h"
#include "optim/param_groups.h"
#include "shoal/error.h"

namespace shoal {
namespace {

bool same(const std::optional<NamedState>& a, const std::optional<NamedState>& b) {
  if (!a || !b) return !a && !b;
  if (a->tensors.size() != b->tensors.size()) return false;
  return std::all_of(a->tensors.begin(), a->tensors.end(), [&](const auto& entry) {
    const auto other = b->tensors.find(entry.first);
    return other != b->tensors.end() && other->second.const_data_ptr() == entry.second.const_data_ptr() &&
           other->second.scalar_type() == entry.second.scalar_type() && other->second.sizes() == entry.second.sizes();
  });
}

// The elements as the program has them: in the parameter, or, if that rounds them, in the float32 copy where it has not
// been written.
at::Tensor current_values(const UpdateTarget& target) {
  const auto now = in_memory_order(target.parameter.detach()).narrow(0, target.range.begin, target.range.size());
  if (!target.rounded.defined()) return now;
  auto exact = in_memory_order(target.values.detach());
  if (at::equal(exact.to(now.scalar_type()), now)) return exact;
  exact = exact.clone();
  take_written(now, exact);
  return exact;
}

// What ranks report of divisions before another one is made. Of all ranks the most of each number; the least of what
// has to be equal is the most of minus it.
struct DivisionReport {
  static constexpr double nothing = -std::numeric_limits<double>::infinity();

  double sealed = nothing;
  double made = nothing, minus_made = nothing;
  double tries = 0;
  double updates = nothing, minus_updates = nothing;
  double has_second_owners = 0, comes = 0, has_before = 0, has_written = 0;  // 1: yes

  DivisionReport most(const Group& group) const {
    using Numbers = std::array<double, sizeof(DivisionReport) / sizeof(double)>;
    auto numbers = std::bit_cast<Numbers>(*this);
    const auto all = group.all_reduce({numbers.begin(), numbers.end()}, ReduceOp::max, {-1, -1, "whose shards count"});
    std::copy(all.begin(), all.end(), numbers.begin());
    return std::bit_cast<DivisionReport>(numbers);
  }
};

DivisionReport report_of(const ShardedOptimizerBase::State& state) {
  const SecondOwners first;  // of a rank that was none so far
  const auto& own = state.second_owners ? *state.second_owners : first;
  const bool has_none = own.sealed == SecondOwners::none;
  DivisionReport report{.tries = static_cast<double>(own.tries)};
  if (!has_none) {
    report.sealed = static_cast<double>(own.sealed);
    report.made = static_cast<double>(own.made);
    report.minus_made = -report.made;
  }
  if (state.second_owners && !has_none && !own.former) {
    report.updates = static_cast<double>(state.steps);
    report.minus_updates = -report.updates;
  }
  report.has_second_owners = state.second_owners ? 1 : 0;
  report.comes = own.comes ? 1 : 0;
  report.has_before = own.before ? 1 : 0;
  report.has_written = state.second_owners && !own.former && state.is_written() ? 1 : 0;
  return report;
}

}  // namespace

std::vector<int> choose_second_owners(const std::vector<int>& hosts) {
  const auto groups = ranks_by_host(hosts);
  std::vector<int> owners(hosts.size());
  for (size_t host = 0; host < groups.size(); ++host) {
    const auto& next = groups[(host + 1) % groups.size()];
    const size_t shift = groups.size() == 1 ? 1 : 0;
    for (size_t place = 0; place < groups[host].size(); ++place) {
      owners[static_cast<size_t>(groups[host][place])] = next[(place + shift) % next.size()];
    }
  }
  return owners;
}

ShardSource ShardedOptimizerBase::State::source_of_all_shards(const ParamGroups& groups) {
  const auto names = shard_names();
  const auto& held = this->held(groups);
  std::vector<ShardSource::Shard> list;
  for (size_t rank = 0; rank < held.targets().size(); ++rank) {
    for (size_t i = 0; i < held.targets()[rank].size(); ++i) {
      auto target = held.targets()[rank][i];
      if (target.range.empty()) continue;
      target.values = current_values(target);
      list.push_back({names.at(target.parameter.unsafeGetTensorImpl()), target, held.state(static_cast<int>(rank), i)});
    }
  }
  ShardSource source(std::move(list));
  source.set_written(true);
  return source;
}

void ShardedOptimizerBase::State::add_own_state(SecondOwnerCheck& check) const {
  const auto present = shards();
  bool unchanged = present.size() == second_owners->updated.size();
  for (size_t i = 0; i < present.size(); ++i) {
    unchanged = unchanged && same(present[i].state, second_owners->updated[i].state);
    if (present[i].state) check.add_state(present[i].owner, *present[i].state);
  }
  check.replaced = !unchanged;
}

void ShardedOptimizerBase::enable_second_owners() {
  auto& state = *state_;
  const ShardSource former(state.shards());
  auto local = make_local(state.make, state.enable_second_owners(param_groups_), *defaults_, state.name);
  copy_options(state.local->param_groups(), local->param_groups());
  state.local = std::move(local);
  state.second_owners.emplace();
  former.fill(state.group, state.shards(), *state.local);
  state.second_owners->updated = state.shards();
}

void ShardedOptimizerBase::disable_second_owners() {
  auto& state = *state_;
  state.second_owners.reset();
  const auto others = state.disable_second_owners();
  for (auto& group : state.local->param_groups()) {
    std::erase_if(group.params(), [&](const at::Tensor& values) {
      const bool of_others =
          std::any_of(others.begin(), others.end(), [&](const at::Tensor& other) { return other.is_same(values); });
      if (of_others) state.local->state().erase(values.unsafeGetTensorImpl());
      return of_others;
    });
  }
}

void ShardedOptimizerBase::come_without_shards() {
  auto& state = *state_;
  if (state.second_owners) return;  // it has come so far before, and has been told to wait for another try
  state.second_owners.emplace();
  state.second_owners->sealed = state.second_owners->made = SecondOwners::none;
  state.second_owners->comes = true;
  state.second_owners->former.emplace();
}

void ShardedOptimizerBase::State::seal_division(int64_t division) {
  auto& second = *second_owners;
  second.sealed = division;
  if (second.grows && !second.before) second.before = std::move(second.former);
  second.former.reset();
  second.comes = false;
  guarded.reset();  // of before, where ranks shared their memory
  alone.reset();
}

// A division counts if some rank knows that all have made it, or if all that are left have. Then all of them have it
// here.
void ShardedOptimizerBase::begin_regroup(const Group& group, bool apart) {
  auto& state = *state_;
  state.end_outdated();
  const auto most = report_of(state).most(group);
  if (std::isfinite(most.updates) && most.updates != -most.minus_updates) refuse_unequal_updates();
  if (most.has_second_owners == 0 && !apart) return;  // ranks share their memory, as before
  const bool had_second_owners = state.second_owners.has_value();
  if (!had_second_owners) state.second_owners.emplace();
  auto& second = *state.second_owners;
  const bool has_none = second.sealed == SecondOwners::none;
  const bool all_made_it = most.made == -most.minus_made;
  const auto counts = static_cast<int64_t>(all_made_it ? most.made : most.sealed);
  if (has_none) {
    second.sealed = counts;
  } else if (counts > second.sealed) {
    state.seal_division(counts);
  }
  second.made = second.sealed;
  second.tries = static_cast<int64_t>(most.tries) + 1;
  second.grows = most.comes != 0;
  if (most.has_written != 0) second.before.reset();
  const bool has_come_since = most.has_before != 0 && most.has_written == 0 && !second.before;
  if (has_come_since) second.before.emplace();
  if (second.former) return;
  const torch::NoGradGuard no_grad;
  if (!had_second_owners) {
    second.former = state.source_of_all_shards(param_groups_);
    return;
  }
  // What programs have written since the last step, as all of them do.
  const bool has_written = state.is_written();
  state.adopt_alone();
  second.former.emplace(state.shards());
  second.former->set_written(has_written);
}

void ShardedOptimizerBase::take_over_from_owners(int64_t step) {
  auto& state = *state_;
  auto& second = *state.second_owners;
  const bool goes_on = state.apart();
  const auto groups = goes_on ? state.enable_second_owners(param_groups_) : state.own_part(param_groups_);
  state.local = make_local(state.make, groups, *defaults_, state.name);
  state.steps = step;
  const auto wanted = state.shards();
  second.former->fill(state.group, wanted, *state.local, second.before ? &*second.before : nullptr);
  state.take_filled();
  if (goes_on) {
    state.publish_deferred_update();
    second.updated = state.shards();
    second.made = second.tries;
    state.group.barrier(state.label("the new shards")).wait();
    state.seal_division(second.made);
    return;
  }
  std::unique_ptr<GuardedUpdate> made;
  if (state.group.size() > 1) {
    made = std::make_unique<GuardedUpdate>(state.group, state.shared_targets(param_groups_), *state.local,
                                           state.element_wise);
    made->seal();
  }
  state.guarded = std::move(made);
  state.alone.reset();
  state.second_owners.reset();
}

}  // namespace shoal
