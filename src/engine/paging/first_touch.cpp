#include "engine/paging/first_touch.h"

#include <c10/util/ScopeExit.h>

#include <set>

namespace shoal {

FirstTouch::~FirstTouch() {
  disarm();
}

void FirstTouch::disarm() {
  const std::lock_guard lock(mutex_);
  for (const auto& [storage, index] : armed_) {
    give_pointer(storage);
    unwatch(storage, *this);
  }
  armed_.clear();
}

void FirstTouch::arm(size_t index, const at::Tensor& memory, const std::string& about) {
  const std::lock_guard lock(mutex_);
  auto* storage = memory.storage().unsafeGetStorageImpl();
  armed_.emplace(storage, index);
  watch(storage, *this);
  if (storage->nbytes() == 0 || pointers_.contains(storage)) return;
  pointers_.emplace(storage, storage->set_data_ptr(c10::DataPtr(nullptr, storage->device())));
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(about);
}

void FirstTouch::give_pointer(c10::StorageImpl* storage) {
  const auto kept = pointers_.find(storage);
  if (kept == pointers_.end()) return;
  storage->set_data_ptr_noswap(std::move(kept->second));
  storage->clear_data_ptr_access_error_msg_();
  pointers_.erase(kept);
}

void FirstTouch::touch_all() {
  const std::lock_guard lock(mutex_);
  while (!armed_.empty()) touch(armed_.begin()->first);
}

void FirstTouch::begin_use(std::string_view, std::span<c10::StorageImpl* const> memory) {
  const std::lock_guard lock(mutex_);  // other threads that use the same memory wait here
  for (auto* storage : memory) touch(storage);
}

void FirstTouch::touch(c10::StorageImpl* storage) {
  const auto [begin, end] = armed_.equal_range(storage);
  if (begin == end) return;
  std::set<size_t> indices;
  for (auto entry = begin; entry != end; ++entry) indices.insert(entry->second);
  for (const auto& [armed, index] : armed_) {
    if (indices.contains(index)) give_pointer(armed);
  }
  const UnwatchedOperators own;
  // Stays watched until the end, so that other threads wait.
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
