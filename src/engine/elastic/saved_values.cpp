#include "engine/elastic/saved_values.h"

#include <torch/utils.h>

#include <atomic>
#include <utility>

#include "memory/views.h"

namespace shoal {
namespace {

constexpr int64_t saved_alignment = 128;

int64_t aligned(int64_t bytes) {
  return (bytes + saved_alignment - 1) / saved_alignment * saved_alignment;
}

using Word = std::atomic<int64_t>;

}  // namespace

SavedValues::SavedValues(const Group& group, UpdateTargets targets) : targets_(std::move(targets)) {
  int64_t end = 0;
  for (const auto& list : targets_) {
    places_.push_back(end);
    end += saved_alignment;
    for (const auto& target : list) end += aligned(static_cast<int64_t>(target.values.nbytes()));
  }
  memory_ = group.allocate_host_shared(end, at::kByte, std::vector<Range>(targets_.size())).tensor();
}

std::byte* SavedValues::at(int64_t offset) const {
  return static_cast<std::byte*>(memory_.data_ptr()) + offset;
}

template <class Copy>
void SavedValues::for_each(int rank, const Copy& copy) const {
  const torch::NoGradGuard no_grad;
  auto place = places_[static_cast<size_t>(rank)] + saved_alignment;
  for (const auto& target : targets_[static_cast<size_t>(rank)]) {
    const auto& values = target.values;
    const auto saved = at::from_blob(at(place), {values.numel()}, values.options().requires_grad(false));
    copy(target, in_memory_order(values.detach()), saved);
    place += aligned(static_cast<int64_t>(values.nbytes()));
  }
}

void SavedValues::save(int rank) {
  for_each(rank, [](const UpdateTarget&, const at::Tensor& values, at::Tensor saved) { saved.copy_(values); });
  reinterpret_cast<Word*>(at(places_[static_cast<size_t>(rank)]))->store(1);
}

void SavedValues::restore(int rank) {
  auto& word = *reinterpret_cast<Word*>(at(places_[static_cast<size_t>(rank)]));
  if (word.load() == 0) return;
  for_each(rank, [](const UpdateTarget& target, at::Tensor values, const at::Tensor& saved) {
    values.copy_(saved);
    if (target.rounded.defined()) at::Tensor(target.rounded).copy_(values);
  });
  word.store(0);
}

void SavedValues::restore_all() {
  for (int rank = 0; rank < static_cast<int>(targets_.size()); ++rank) restore(rank);
}

}  // namespace shoal
