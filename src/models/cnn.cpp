#include "models/cnn.h"

#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/relu.h>

namespace shoal::models {

StageImpl::StageImpl(int64_t channels_in, int64_t channels_out)
    : conv_(torch::nn::Conv2dOptions(channels_in, channels_out, 3).padding(1).bias(false)), bn_(channels_out) {
  register_module("conv", conv_);
  register_module("bn", bn_);
}

at::Tensor StageImpl::forward(const at::Tensor& x) {
  return at::max_pool2d(at::relu(bn_(conv_(x))), 2);
}

Cnn::Cnn(int64_t channels) : stage1_(1, channels), stage2_(channels, 2 * channels), fc_(2 * channels * 7 * 7, 10) {
  register_module("stage1", stage1_);
  register_module("stage2", stage2_);
  register_module("fc", fc_);
}

at::Tensor Cnn::forward(at::Tensor input) {
  const auto x = stage2_(stage1_(input.view({-1, 1, 28, 28})));
  return fc_(x.flatten(1));
}

std::vector<std::shared_ptr<torch::nn::Module>> Cnn::units() const {
  return {stage1_.ptr(), stage2_.ptr(), fc_.ptr()};
}

}  // namespace shoal::models
