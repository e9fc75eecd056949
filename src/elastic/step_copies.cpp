#include "elastic/step_copies.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/utils.h>

#include <mutex>

namespace shoal {

StepCopies::StepCopies(const torch::nn::Module& module) : buffers_(module.buffers()) {
  for (const auto& buffer : buffers_) copies_.push_back(at::empty_like(buffer));
}

void StepCopies::take() {
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < buffers_.size(); ++i) copies_[i].copy_(buffers_[i]);
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
  for (const auto& buffer : buffers_) values.push_back(buffer.detach().clone());
  return values;
}

void StepCopies::set_buffers(const std::vector<at::Tensor>& values) const {
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < buffers_.size(); ++i) at::Tensor(buffers_[i]).copy_(values[i]);
}

}  // namespace shoal
