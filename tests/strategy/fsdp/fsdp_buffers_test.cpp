// FSDP05: buffer_dtype is the dtype of buffers in memory; checkpoints hold them in their own dtype.

#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <filesystem>

#include "checkpoint/loading/reader.h"
#include "comm/group/text.h"
#include "shoal/checkpoint.h"
#include "tests/strategy/fsdp/fsdp_training.h"
#include "tests/support/temp_folder.h"

namespace shoal::test::fsdp_buffers_test {
namespace {

// Two buffers with the same short name and different dtypes.
struct BufferedImpl : torch::nn::Module {
  struct PartImpl : torch::nn::Module {
    explicit PartImpl(at::ScalarType dtype) {
      weight = register_parameter("weight", at::ones({5}));
      scale = register_buffer("scale", at::full({5}, 1.0 / 3, dtype));
      count = register_buffer("count", at::zeros({1}, at::kLong));
    }
    at::Tensor weight, scale, count;
  };
  BufferedImpl() {
    a = register_module("a", std::make_shared<PartImpl>(at::kFloat));
    b = register_module("b", std::make_shared<PartImpl>(at::kDouble));
  }
  at::Tensor forward(const at::Tensor& x) { return x * a->weight * b->weight; }
  std::shared_ptr<PartImpl> a, b;
};

TEST(Fsdp, FSDP05_checkpoints_hold_buffers_in_their_own_dtype) {
  std::unique_ptr<TempFolder> folder;
  if (group().rank() == 0) folder = std::make_unique<TempFolder>();
  const auto text = broadcast_text(group(), folder ? folder->path().string() : "", 0, {});
  const auto path = std::filesystem::path(text) / "run";
  const auto model = std::make_shared<BufferedImpl>();
  FullyShardedDataParallel<BufferedImpl> parallel(model, group(), {.buffer_dtype = at::kHalf});
  FullyShardedOptimizer<torch::optim::SGD> optimizer(parallel, sgd);
  TrainingState training(parallel, optimizer);
  const auto rounded = model->a->scale.clone();
  ASSERT_EQ(rounded.scalar_type(), at::kHalf);
  save(path, training, {.step = 1});
  {
    const CheckpointReader reader(path);
    EXPECT_EQ(reader.tensor("a.scale").dtype, at::kFloat);
    EXPECT_EQ(reader.tensor("b.scale").dtype, at::kDouble);
    EXPECT_EQ(reader.tensor("b.count").dtype, at::kLong);
    EXPECT_TRUE(at::equal(reader.read("a.scale"), rounded.to(at::kFloat)));
  }
  model->a->scale.fill_(2);
  model->b->scale.fill_(2);
  load(path, training);
  for (const auto& part : {model->a, model->b}) {
    EXPECT_EQ(part->scale.scalar_type(), at::kHalf);
    EXPECT_TRUE(at::equal(part->scale, rounded));
  }
  group().barrier().wait();  // rank 0 removes the folder
}

}  // namespace
}  // namespace shoal::test::fsdp_buffers_test
