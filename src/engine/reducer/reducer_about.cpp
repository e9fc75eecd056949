// Queries about buckets and gradients, and the end of the wrapper.

#include <fmt/format.h>

#include "engine/reducer/reducer.h"
#include "shoal/error.h"

namespace shoal {

std::vector<at::Tensor> Reducer::parameters_of(const Bucket& bucket) const {
  std::vector<at::Tensor> list;
  for (const auto member : bucket.members()) list.push_back(gradients_[member].parameter);
  return list;
}

std::vector<Range> Reducer::owners_of(const Bucket& bucket, int ranks) const {
  std::vector<Range> owners;
  for (int rank = 0; rank < ranks; ++rank) owners.push_back(reduction_->plan().kept(bucket, rank));
  return owners;
}

std::vector<int64_t> Reducer::bucket_bytes() const {
  std::vector<int64_t> list;
  for (const auto& bucket : buckets_.all()) list.push_back(bucket.sparse() ? 0 : bucket.layout().bytes());
  return list;
}

std::vector<size_t> Reducer::unused() const {
  std::vector<size_t> list;
  for (size_t i = 0; steps_ > 0 && i < gradients_.size(); ++i) {
    if (!last_.used_anywhere[i]) list.push_back(i);
  }
  return list;
}

std::vector<std::vector<std::string>> Reducer::bucket_names() const {
  std::vector<std::vector<std::string>> names;
  for (const auto& bucket : buckets_.all()) {
    auto& list = names.emplace_back();
    for (const auto member : bucket.members()) list.push_back(gradients_[member].name);
  }
  return names;
}

void Reducer::detach() {
  tracker_.detach();
  callbacks.synchronises = [] { return true; };
  callbacks.holds_back = [] { return false; };
  callbacks.before_writing = [] {};
  callbacks.before_waiting = [] {};
  callbacks.after_sum = {};
}

void Reducer::require_seen_gradients() const {
  if (tracker_.attached()) return;
  for (size_t i = 0; i < gradients_.size(); ++i) {
    if (!gradients_[i].parameter.grad().defined() || accumulated_.sums().stands_in(i)) continue;
    throw UsageError(
        fmt::format("parameter {} has a gradient that ranks have not reduced: the wrapper was destroyed before the "
                    "backward; keep the wrapper as long as its optimizer trains",
                    gradients_[i].name));
  }
}

}  // namespace shoal
