#include "engine/gradients/stand_ins.h"

#include <fmt/format.h>
#include <torch/utils.h>

namespace shoal {
namespace {

// False if the parameter was converted since.
bool fits(const GradientStandIn& stand_in, const at::Tensor& parameter) {
  const auto& tensor = stand_in.tensor();
  return !stand_in.real() && tensor.scalar_type() == parameter.scalar_type() && tensor.sizes() == parameter.sizes();
}

}  // namespace

StandIns::StandIns(const std::vector<Gradient>& gradients, std::string about)
    : gradients_(gradients), about_(std::move(about)), stand_ins_(gradients.size()) {}

StandIns::~StandIns() {
  for (size_t i = 0; i < stand_ins_.size(); ++i) {
    if (present(i)) mutable_grad(i).reset();
  }
}

void StandIns::put(size_t gradient) {
  const auto& parameter = gradients_[gradient].parameter;
  if (parameter.numel() == 0) {  // nothing to stand for
    mutable_grad(gradient) = at::empty_like(parameter, at::TensorOptions().requires_grad(false));
    return;
  }
  auto& one = stand_ins_[gradient];
  if (!one || !fits(*one, parameter)) {
    one = std::make_unique<GradientStandIn>(
        parameter, fmt::format("the gradient of parameter {}, {}", gradients_[gradient].name, about_));
  }
  one->renew();
  mutable_grad(gradient) = one->tensor();
}

bool StandIns::present(size_t gradient) const {
  return stand_ins_[gradient] && stand_ins_[gradient]->is(gradients_[gradient].parameter.grad());
}

}  // namespace shoal
