#include "engine/reducer/step_trailer.h"

#include <torch/utils.h>

namespace shoal {

void StepTrailer::write(const std::vector<bool>& used, const std::vector<bool>& came, double weight) {
  // Fills on the host and copies once, instead of one small operation per gradient.
  auto values = at::empty({memory_.numel()}, at::kDouble);
  auto* value = values.data_ptr<double>();
  for (const auto gradient : of_) *value++ = used[gradient] ? 1 : came[gradient] ? came_alone : 0;
  *value = weight;
  memory_.copy_(values);
}

double StepTrailer::weight() const {
  return memory_[memory_.numel() - 1].item<double>();
}

bool StepTrailer::same_on_all(int ranks) const {
  const auto flags = memory_.narrow(0, 0, memory_.numel() - 1);
  return flags.eq(0).logical_or(flags.eq(ranks)).all().item<bool>();
}

void StepTrailer::read(std::vector<bool>& used, std::vector<bool>& came) const {
  const auto flags = memory_.to(at::kCPU, at::kDouble);
  const auto* value = flags.data_ptr<double>();
  for (const auto gradient : of_) {
    used[gradient] = *value > 0.5;
    came[gradient] = *value++ > 0;
  }
}

}  // namespace shoal
