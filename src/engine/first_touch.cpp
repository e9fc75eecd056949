#include "engine/first_touch.h"

#include <c10/util/ScopeExit.h>

#include <set>

namespace shoal {

FirstTouch::~FirstTouch() {
  for (const auto& [storage, index] : armed_) unwatch(storage, *this);
}

void FirstTouch::arm(size_t index, const at::Tensor& memory) {
  const std::lock_guard lock(mutex_);
  auto* storage = memory.storage().unsafeGetStorageImpl();
  armed_.emplace(storage, index);
  watch(storage, *this);
}

void FirstTouch::touch_all() {
  const std::lock_guard lock(mutex_);
  while (!armed_.empty()) touch(armed_.begin()->first);
}

void FirstTouch::begin_use(std::string_view, std::span<c10::StorageImpl* const> memory) {
  const std::lock_guard lock(mutex_);  // others that take the same memory wait as well
  for (auto* storage : memory) touch(storage);
}

void FirstTouch::touch(c10::StorageImpl* storage) {
  const auto [begin, end] = armed_.equal_range(storage);
  if (begin == end) return;
  std::set<size_t> indices;
  for (auto entry = begin; entry != end; ++entry) indices.insert(entry->second);
  const UnwatchedOperators own;
  // Watched until the end, so that other threads wait, too.
  const auto disarm = c10::make_scope_exit([&] {
    std::set<c10::StorageImpl*> storages;
    std::erase_if(armed_, [&](const auto& entry) {
      const bool done = indices.contains(entry.second);
      if (done) storages.insert(entry.first);
      return done;
    });
    for (auto* done : storages) {
      if (!armed_.contains(done)) unwatch(done, *this);
    }
  });
  for (const auto index : indices) touched_(index);
}

}  // namespace shoal
