// The fused optimizer against libtorch's own, over many steps.

#include "shoal/optim/fused_adamw.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "shoal/base/error.h"

namespace shoal {
namespace {

using torch::optim::AdamWOptions;

std::vector<at::Tensor> parameters(at::ScalarType dtype) {
  torch::manual_seed(3);
  std::vector<at::Tensor> list{at::randn({5, 7}, dtype), at::randn({}, dtype), at::randn({2, 3, 4, 4}, dtype),
                               at::randn({9}, dtype)};
  list[2] = list[2].contiguous(at::MemoryFormat::ChannelsLast);
  for (auto& tensor : list) tensor.requires_grad_(true);
  return list;
}

void set_gradients(std::vector<at::Tensor>& list, int step) {
  torch::manual_seed(100 + step);
  for (size_t i = 0; i < list.size(); ++i) {
    // One parameter has no gradient in some steps.
    list[i].mutable_grad() = i == 3 && step % 3 == 0 ? at::Tensor() : at::randn_like(list[i]);
  }
}

void compare(const AdamWOptions& options, at::ScalarType dtype, double tolerance) {
  auto own = parameters(dtype);
  auto reference = parameters(dtype);
  FusedAdamW fused(own, options);
  torch::optim::AdamW plain(reference, options);
  for (int step = 0; step < 20; ++step) {
    set_gradients(own, step);
    set_gradients(reference, step);
    fused.step();
    plain.step();
    for (size_t i = 0; i < own.size(); ++i) {
      ASSERT_TRUE(at::allclose(own[i], reference[i], tolerance, tolerance)) << "step " << step << ", parameter " << i;
    }
  }
}

TEST(FusedAdamW, EqualsLibtorchsAdamW) {
  compare(AdamWOptions(1e-2).weight_decay(0.1), at::kDouble, 1e-12);
  compare(AdamWOptions(1e-2).weight_decay(0.1), at::kFloat, 2e-5);
  compare(AdamWOptions(3e-2).betas({0.8, 0.95}).eps(1e-6), at::kDouble, 1e-12);
  compare(AdamWOptions(1e-2).amsgrad(true), at::kDouble, 1e-12);
}

TEST(FusedAdamW, RefusesSparseGradients) {
  auto weight = at::randn({4, 2}).requires_grad_(true);
  weight.mutable_grad() = at::randn({4, 2}).to_sparse(1);
  FusedAdamW optimizer({weight}, AdamWOptions(1e-2));
  EXPECT_THROW(optimizer.step(), UsageError);
}

}  // namespace
}  // namespace shoal
