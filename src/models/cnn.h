#pragma once
// CNN: two convolutional stages over 28 x 28 images and a linear layer to 10 classes. Has buffers (batch norm).

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include "models/model.h"

namespace shoal::models {

// 3 x 3 convolution without bias, batch norm, ReLU, 2 x 2 max-pool.
class StageImpl : public torch::nn::Module {
 public:
  StageImpl(int64_t channels_in, int64_t channels_out);
  at::Tensor forward(const at::Tensor& x);

 private:
  torch::nn::Conv2d conv_;
  torch::nn::BatchNorm2d bn_;
};
TORCH_MODULE(Stage);

class Cnn : public Model {
 public:
  explicit Cnn(int64_t channels);
  at::Tensor forward(at::Tensor input) override;
  std::vector<std::shared_ptr<torch::nn::Module>> units() const override;

 private:
  Stage stage1_, stage2_;
  torch::nn::Linear fc_;
};

}  // namespace shoal::models
