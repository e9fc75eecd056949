#include "engine/buckets/step_trailer.h"

#include <ATen/Dispatch.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>

namespace shoal {
namespace {

// Calls act(pointer to the elements) on memory of the CPU: one operator costs as much as a small model's whole trailer.
template <class Act>
void visit(const at::Tensor& memory, const Act& act) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, memory.scalar_type(), "StepTrailer",
                                  [&] { act(memory.data_ptr<scalar_t>()); });
}

}  // namespace

void StepTrailer::write(const std::vector<bool>& used, const std::vector<bool>& came, Forwards forwards,
                        double weight) {
  auto host = memory_.is_cpu() ? memory_ : at::empty({memory_.numel()}, memory_.options().device(at::kCPU));
  visit(host, [&](auto* value) {
    for (const auto gradient : of_) *value++ = used[gradient] ? 1 : came[gradient] ? came_alone : 0;
    *value++ = forwards == Forwards::dropped ? 1 : forwards == Forwards::used ? used_all : 0;
    *value = weight;
  });
  if (!memory_.is_cpu()) memory_.copy_(host);
}

double StepTrailer::weight() const {
  double weight = 0;
  visit(memory_.cpu(), [&](const auto* value) { weight = value[of_.size() + 1]; });
  return weight;
}

bool StepTrailer::some_are_behind(int ranks) const {
  constexpr int most_ranks = 1024;  // whose sum is exact in float32
  if (!exact() || ranks > most_ranks) return false;
  double sum = 0;
  visit(memory_.cpu(), [&](const auto* value) { sum = value[of_.size()]; });
  return sum > 1 && sum != std::floor(sum);
}

bool StepTrailer::same_on_all(int ranks) const {
  bool same = true;
  visit(memory_.cpu(), [&](const auto* value) {
    const auto none_or_all = [&](double flag) { return flag == 0 || flag == ranks; };
    same = std::all_of(value, value + of_.size(), none_or_all);
  });
  return same;
}

void StepTrailer::read(std::vector<bool>& used, std::vector<bool>& came) const {
  visit(memory_.cpu(), [&](const auto* value) {
    for (const auto gradient : of_) {
      used[gradient] = *value > 0.5;
      came[gradient] = *value++ > 0;
    }
  });
}

}  // namespace shoal
