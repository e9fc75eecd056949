#include "comm/group/released_groups.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/start_thread.h"
#include "shoal/error.h"

namespace shoal {

ReleasedGroups::~ReleasedGroups() {
  static std::mutex mutex;
  static auto& to_the_end = *new std::vector<Group>;  // kept until the process ends
  const std::lock_guard lock(mutex);
  for (auto& group : groups_) to_the_end.push_back(std::move(group));
}

void ReleasedGroups::keep(std::shared_ptr<Transport> transport, c10::intrusive_ptr<c10d::Store> store, int rank,
                          int ranks) {
  const std::lock_guard lock(mutex_);
  groups_.push_back({std::move(transport), std::move(store), rank, ranks});
}

void ReleasedGroups::end_unreferenced(bool aside) {
  const std::lock_guard lock(mutex_);
  for (auto& group : groups_) {
    const auto key = [](int rank) { return "let go by " + std::to_string(rank); };
    if (!std::exchange(group.said, true)) group.store->set(key(group.rank), std::vector<uint8_t>{1});
    std::vector<std::string> keys;
    for (int rank = 0; rank < group.ranks; ++rank) keys.push_back(key(rank));
    group.unreferenced = group.store->check(keys);
  }
  const auto first =
      std::partition(groups_.begin(), groups_.end(), [](const Group& group) { return !group.unreferenced; });
  std::vector<Group> ending(std::make_move_iterator(first), std::make_move_iterator(groups_.end()));
  groups_.erase(first, groups_.end());
  if (!aside) return;
  for (auto& group : ending) end_aside(std::move(group.transport));
}

void end_aside(std::shared_ptr<Transport> transport) {
  auto* kept = new std::shared_ptr<Transport>(std::move(transport));
  try {
    start_thread("ends a group", [kept] { delete kept; }).detach();
  } catch (const UsageError&) {  // NOLINT(bugprone-empty-catch): no thread can be started, so it stays until the
                                 // process ends
  }
}

}  // namespace shoal
