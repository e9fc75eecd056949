// Parameters that the program has loaded or replaced since the last step.

#include <fmt/format.h>
#include <torch/utils.h>

#include <unordered_set>

#include "engine/changes/changed_values.h"
#include "engine/changes/separate_memory.h"
#include "memory/views.h"
#include "shoal/error.h"
#include "strategy/decentralized/state.h"

namespace shoal {

using State = DecentralizedDataParallelCore::State;

namespace {

std::string loaded_alone(const std::string& parameter, int rank) {
  return fmt::format(
      "DecentralizedDataParallel: parameter {} has been loaded or replaced on rank {}, and neighbours would mix what "
      "that rank had before into it; when all ranks have loaded, call global_avg() on all of them",
      parameter, rank);
}

}  // namespace

void State::require_that_all_go_on(int64_t version) const {
  const auto stopped = mixing.stopped_before(version);
  if (!stopped) return;
  const auto [rank, gradient] = *stopped;
  throw UsageError(loaded_alone(gradient < gradients.size() ? gradients[gradient].name : "?", group.world_rank(rank)));
}

// Before the first step ranks agree on their initial values; later a rank that alone replaces values must stop, because
// neighbours still have the old ones.
void State::adopt_changes() {
  for (const auto& bucket : buckets) bucket.require_kinds();
  const bool loaded = loads.changed(watch.parameters());
  if (!loaded) loads.clear();
  if (!loaded && !watch.changed()) return;
  if (buckets.empty() || group.size() == 1) separate();
  std::vector<ChangedValue> values;
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!loaded && !watch.changed(i)) continue;
    values.push_back({gradients[i].name, digest_of(gradients[i].parameter)});
    if (buckets.empty() || group.size() == 1) continue;
    mixing.stop(static_cast<uint32_t>(i));
    throw UsageError(loaded_alone(gradients[i].name, group.world_rank(group.rank())));
  }
  if (!values.empty() && buckets.empty()) agree_on_values(group, values);
  watch.note();
  loads.clear();
}

void State::separate() {
  if (homes.empty()) return;
  const torch::NoGradGuard no_grad;
  std::vector<at::Tensor> replaced;
  std::unordered_set<const c10::StorageImpl*> on_homes;
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!same_storage(gradients[i].parameter, homes[i])) replaced.push_back(gradients[i].parameter);
  }
  if (replaced.empty()) return;
  std::vector<NamedTensor> named;
  for (const auto& gradient : gradients) {
    named.push_back({.name = gradient.name, .aliases = {}, .tensor = gradient.parameter});
  }
  require_separate_memory(named, {}, "DecentralizedDataParallel");
  for (const auto& home : homes) on_homes.insert(home.storage().unsafeGetStorageImpl());
  for (const auto& parameter : replaced) {
    const bool on_home = on_homes.contains(parameter.storage().unsafeGetStorageImpl());
    if (on_home) parameter.set_data(parameter.detach().clone());
  }
}

}  // namespace shoal
