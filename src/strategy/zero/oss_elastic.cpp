// OSS in an elastic job: guarded steps, and the shares of ranks that have ended divided among those that are left.

#include <fmt/format.h>

#include <algorithm>

#include "comm/group/hosts.h"
#include "comm/group/rank_groups.h"
#include "engine/elastic/guarded_update.h"
#include "shoal/error.h"
#include "strategy/zero/oss_state.h"

namespace shoal {

// A rank's optimizer has the parameters of a group in the order of the shares.
UpdateTargets OSSCore::State::shared_targets(const ParamGroups& groups) {
  std::unordered_map<const c10::TensorImpl*, size_t> numbers;
  for (size_t number = 0; number < groups.size(); ++number) {
    for (const auto& parameter : groups[number].params()) numbers[parameter.unsafeGetTensorImpl()] = number;
  }
  UpdateTargets targets(static_cast<size_t>(group.size()));
  for (size_t i = 0; i < shares.parameters.size(); ++i) {
    const auto& parameter = shares.parameters[i];
    targets[static_cast<size_t>(shares.owners[i])].push_back(
        {.values = parameter,
         .param_group = numbers.at(parameter.unsafeGetTensorImpl()),
         .parameter = parameter,
         .range = {0, parameter.numel()}});
  }
  return targets;
}

void OSSCore::State::divide_anew() {
  std::fill(shares.owners.begin(), shares.owners.end(), -1);
  choose_owners(shares);
  fill_buffers();
  ++times_shared;
}

namespace {

// Whether the group is for the ranks of this host, of those of `job`. UsageError for hosts of different numbers of
// ranks, unless so many `owners` of each host own the parameters.
bool is_that_of_this_host(const Group& group, const Group& job, std::optional<int> owners) {
  if (group.name() == job.name()) return is_by_host(group);  // there is one host, so far
  const auto groups = ranks_by_host(hosts_of(job));
  if (world_ranks(group) != hybrid_ranks(groups, job.rank()).inside) return false;
  const int least = smallest(groups);
  if (owners != least && least * static_cast<int>(groups.size()) != job.size()) {
    throw UsageError(
        "Elastic: OSS over world.group().by_host() with DistributedDataParallel needs equally many ranks on each host "
        "at the start: all hosts must divide the parameters alike, as ShardedDataParallel makes them do");
  }
  return true;
}

}  // namespace

void OSSCore::require_regroupable(const Group& job) {
  if (is_that_of_this_host(state().group, job, state().owners)) state().everybody = job;
  if (state().options.broadcast_fp16) throw UsageError("Elastic: OSSOptions::broadcast_fp16 is not supported");
  if (needs_second_owners(job)) return;
  const auto& buffers = state().buffers;
  const bool shared = std::all_of(buffers.begin(), buffers.end(), [](const auto& buffer) { return buffer->shared(); });
  if (job.all_reduce(shared ? 1 : 0, ReduceOp::min, state().label("whether parameters are shared")) == 0) {
    throw UsageError(
        "Elastic: OSS outlives its ranks only where they share its parameters: on the CPU of one host, over the "
        "transport auto or host (of all hosts); on several give it world.group().by_host(), and its wrapper "
        "world.group()");
  }
}

bool OSSCore::shards_across_hosts() const {
  return !state().everybody && !is_by_host(state().group);
}

bool OSSCore::needs_second_owners(const Group& job) const {
  return shards_across_hosts() && job.size() > 1 && job.transport() != "host";
}

bool OSSCore::has_owner(const at::Tensor& parameter) const {
  return state().shares.owner_of(parameter).has_value();
}

void OSSCore::regroup(const Group& group, int64_t step) {
  auto& state = this->state();
  if (shards_across_hosts()) begin_regroup(group, needs_second_owners(group));
  if (state.second_owners) {
    state.group = group;
    state.steps = step;  // which a rank that has come does not know, for labels
    state.second_shards.owners.clear();
    state.second_shards.gradients.reset();
    state.divide_anew();
    return take_over_from_owners(step);
  }
  if (group.size() == 1 && !state.has_commit() && !state.alone) {  // as before
    state.group = group;
    state.steps = step;
    return;
  }
  state.held(param_groups_);
  if (state.everybody || is_by_host(state.group)) {
    // The same ones on each host, so that all add up a norm in the same order.
    state.everybody = group;
    state.owners = smallest(ranks_by_host(hosts_of(group)));
    state.group = group.by_host();
  } else {
    state.group = group;
  }
  state.divide_anew();
  state.local = make_local(state.make, state.own_part(param_groups_), *defaults_, state.name);
  take_over(step);
}

}  // namespace shoal
