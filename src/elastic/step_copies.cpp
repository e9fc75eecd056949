#include "elastic/step_copies.h"

#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <algorithm>
#include <mutex>

#include "shoal/error.h"

namespace shoal {

StepCopies::StepCopies(const torch::nn::Module& module) : module_(module) {}

void StepCopies::take() {
  const torch::NoGradGuard no_grad;
  const auto buffers = module_.buffers();
  copies_.resize(buffers.size());
  for (size_t i = 0; i < buffers.size(); ++i) {
    const bool fits = copies_[i].defined() && copies_[i].sizes() == buffers[i].sizes() &&
                      copies_[i].scalar_type() == buffers[i].scalar_type();
    if (!fits) copies_[i] = at::empty_like(buffers[i]);
    copies_[i].copy_(buffers[i]);
  }
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  generator_ = generator.get_state();
}

void StepCopies::restore() const {
  restore_buffers();
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  generator.set_state(generator_);
}

void StepCopies::restore_buffers() const {
  set_buffers(copies_);
}

std::vector<at::Tensor> StepCopies::present_buffers() const {
  std::vector<at::Tensor> values;
  for (const auto& buffer : module_.buffers()) values.push_back(buffer.detach().clone());
  return values;
}

void StepCopies::set_buffers(const std::vector<at::Tensor>& values) const {
  const torch::NoGradGuard no_grad;
  const auto buffers = module_.named_buffers();
  for (size_t i = 0; i < std::min(values.size(), buffers.size()); ++i) {
    at::Tensor buffer = buffers[i].value();
    if (buffer.sizes() != values[i].sizes() || buffer.scalar_type() != values[i].scalar_type()) {
      throw UsageError(
          fmt::format("Elastic: buffer {} was [{}] of {} when the step began and is [{}] of {} now, so it cannot be "
                      "set back: keep its shape and dtype, or do not register it as a buffer",
                      buffers[i].key(), fmt::join(values[i].sizes(), ", "), c10::toString(values[i].scalar_type()),
                      fmt::join(buffer.sizes(), ", "), c10::toString(buffer.scalar_type())));
    }
    buffer.copy_(values[i]);
  }
}

}  // namespace shoal
