// List of a module's tensors.

#include "module/walk.h"

#include <gmock/gmock.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include "shoal/error.h"

namespace shoal {
namespace {

struct NetImpl : torch::nn::Module {
  NetImpl() {
    table = register_module("table", torch::nn::Embedding(torch::nn::EmbeddingOptions(5, 4).sparse(true)));
    norm = register_module("norm", torch::nn::BatchNorm1d(4));
    head = register_module("head", torch::nn::Linear(torch::nn::LinearOptions(4, 5).bias(false)));
    tied = register_parameter("tied", norm->weight);
    norm->bias.requires_grad_(false);
  }
  torch::nn::Embedding table{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Linear head{nullptr};
  at::Tensor tied;
};

std::vector<std::string> names(const std::vector<NamedTensor>& list) {
  std::vector<std::string> result;
  for (const auto& entry : list) result.push_back(entry.name);
  return result;
}

TEST(Walk, lists_each_tensor_once_with_its_aliases) {
  const auto tensors = walk(NetImpl(), {});
  EXPECT_THAT(names(tensors.parameters), ::testing::ElementsAre("tied", "table.weight", "norm.bias", "head.weight"));
  EXPECT_THAT(tensors.parameters[0].aliases, ::testing::ElementsAre("norm.weight"));
  EXPECT_THAT(names(tensors.buffers),
              ::testing::ElementsAre("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"));
}

TEST(Walk, knows_trainable_and_sparse_parameters) {
  const auto tensors = walk(NetImpl(), {});
  EXPECT_THAT(names(tensors.trainable()), ::testing::ElementsAre("tied", "table.weight", "head.weight"));
  EXPECT_TRUE(tensors.parameters[1].sparse_gradient);
  EXPECT_FALSE(tensors.parameters[3].sparse_gradient);
}

TEST(Walk, ignores_by_any_name_and_refuses_unknown_ones) {
  const auto tensors = walk(NetImpl(), {"norm.weight", "norm.running_var"});
  EXPECT_THAT(names(tensors.parameters), ::testing::ElementsAre("table.weight", "norm.bias", "head.weight"));
  EXPECT_EQ(tensors.buffers.size(), 2U);
  EXPECT_THROW(walk(NetImpl(), {"nrom.weight"}), UsageError);
}

TEST(Walk, describes_what_ranks_must_agree_on) {
  auto net = NetImpl();
  EXPECT_THAT(walk(net, {}).describe(), ::testing::Contains("parameter head.weight Float [5, 4]"));
  EXPECT_THAT(walk(net, {}).describe(), ::testing::Contains("frozen parameter norm.bias Float [4]"));
  EXPECT_THAT(walk(net, {}).describe(), ::testing::Contains("parameter tied Float [4] also norm.weight"));
}

}  // namespace
}  // namespace shoal
