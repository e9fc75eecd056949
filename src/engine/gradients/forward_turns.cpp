#include "engine/gradients/forward_turns.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace shoal {
namespace {

struct Table {
  std::mutex mutex;
  std::atomic<int64_t> shared = 0;  // parameters of several wrappers, counted once for each wrapper after the first
  int64_t forwards = 0;
  std::unordered_map<const c10::TensorImpl*, std::vector<ForwardTurns*>> users;
};

Table& table() {
  static auto* one = new Table;  // never destroyed: wrappers may outlive static objects
  return *one;
}

}  // namespace

ForwardTurns::ForwardTurns(std::vector<at::Tensor> parameters, bool open, bool apart)
    : parameters_(std::move(parameters)), open_(open), apart_(apart) {
  const std::lock_guard lock(table().mutex);
  for (const auto& parameter : parameters_) {
    auto& users = table().users[parameter.unsafeGetTensorImpl()];
    users.push_back(this);
    if (users.size() > 1) ++table().shared;
  }
}

ForwardTurns::~ForwardTurns() {
  const std::lock_guard lock(table().mutex);
  for (const auto& parameter : parameters_) {
    const auto entry = table().users.find(parameter.unsafeGetTensorImpl());
    std::erase(entry->second, this);
    if (entry->second.empty()) {
      table().users.erase(entry);
    } else {
      --table().shared;
    }
  }
}

void ForwardTurns::forward() {
  const std::lock_guard lock(table().mutex);
  last_ = ++table().forwards;
  pending_ = true;
}

void ForwardTurns::backward_ended() {
  const std::lock_guard lock(table().mutex);
  pending_ = false;
}

bool ForwardTurns::is_others(const at::Tensor& parameter) const {
  const std::lock_guard lock(table().mutex);
  const auto& users = table().users.at(parameter.unsafeGetTensorImpl());
  return !pending_ && std::any_of(users.begin(), users.end(), [this](const auto* user) { return user->last_ > last_; });
}

bool ForwardTurns::are_shared(const at::Tensor& parameter) {
  if (table().shared.load() == 0) return false;
  const std::lock_guard lock(table().mutex);
  const auto entry = table().users.find(parameter.unsafeGetTensorImpl());
  return entry != table().users.end() && entry->second.size() > 1;
}

template <class Which>
bool ForwardTurns::is_any(const at::Tensor& parameter, const Which& which) {
  const std::lock_guard lock(table().mutex);
  const auto entry = table().users.find(parameter.unsafeGetTensorImpl());
  return entry != table().users.end() && std::any_of(entry->second.begin(), entry->second.end(), which);
}

bool ForwardTurns::are_taken(const at::Tensor& parameter, bool open) {
  return is_any(parameter, [open](const auto* user) { return !open || !user->open_; });
}

bool ForwardTurns::are_apart(const at::Tensor& parameter) {
  return is_any(parameter, [](const auto* user) { return user->apart_; });
}

}  // namespace shoal
