#include "planning/arrival.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/utils.h>

#include <utility>

#include "engine/gradients/gradient_hooks.h"
#include "planning/one_number.h"
#include "training/parts.h"

namespace shoal {
namespace {

// Gradients, buffers and random numbers as they were when this was made.
class Before {
 public:
  explicit Before(const torch::nn::Module& module) : random_(at::detail::getDefaultCPUGenerator().get_state()) {
    for (const auto& parameter : distinct(module.parameters())) {
      auto& gradient = parameter.mutable_grad();
      gradients_.emplace_back(parameter, gradient);
      gradient = at::Tensor();
    }
    for (const auto& buffer : module.buffers()) buffers_.emplace_back(buffer, buffer.detach().clone());
  }
  ~Before() {
    const torch::NoGradGuard no_grad;
    for (auto& [parameter, gradient] : gradients_) parameter.mutable_grad() = gradient;
    for (auto& [buffer, values] : buffers_) buffer.variable_data().copy_(values);
    auto generator = at::detail::getDefaultCPUGenerator();
    generator.set_state(random_);
  }
  Before(const Before&) = delete;
  Before& operator=(const Before&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients_;
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers_;
  at::Tensor random_;
};

}  // namespace

std::vector<size_t> arrival_order(const torch::nn::Module& module, const std::vector<Gradient>& gradients,
                                  const Precision& precision, const std::function<at::Tensor()>& loss) {
  const Before before(module);
  std::vector<at::Tensor> parameters;
  for (const auto& gradient : gradients) parameters.push_back(gradient.parameter);
  std::vector<size_t> order;
  std::vector<bool> arrived(gradients.size());
  const GradientHooks hooks(parameters, [&](size_t gradient) {
    if (!arrived[gradient]) order.push_back(gradient);
    arrived[gradient] = true;
  });
  const auto device = parameters.empty() ? at::kCPU : parameters.front().device().type();
  const auto value = [&] {
    const at::AutoGradMode grad(true);
    const Precision::Scope scope(precision, device);
    return loss();
  }();
  require_one_number("plan", value);
  value.backward();
  for (size_t i = gradients.size(); i-- > 0;) {
    if (!arrived[i]) order.push_back(i);
  }
  return order;
}

}  // namespace shoal
