// Param groups with and without weight decay (DEC16).

#include "shoal/optim.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <functional>
#include <memory>

#include "shoal/error.h"

namespace shoal::decay_groups_test {
namespace {

using testing::UnorderedElementsAre;

struct ManyKindsImpl : torch::nn::Module {
  ManyKindsImpl() {
    const auto embedding = register_module("embedding", torch::nn::Embedding(7, 4));
    register_module("linear", torch::nn::Linear(4, 4));
    register_module("bn", torch::nn::BatchNorm1d(4));
    register_module("gru", torch::nn::GRU(4, 2));
    register_module("norm_of_pictures", torch::nn::LayerNorm(torch::nn::LayerNormOptions({2, 4})));
    register_parameter("bias_k", at::ones({1, 1, 4}));
    register_parameter("scale", at::ones({}));
    register_parameter("head", embedding->weight);  // tied
    register_parameter("table", at::ones({3, 3}), /*requires_grad=*/false);
  }
};

std::vector<std::string> names_of(const torch::nn::Module& module, const std::vector<at::Tensor>& parameters) {
  std::vector<std::string> names;
  for (const auto& parameter : parameters) {
    for (const auto& item : module.named_parameters()) {
      if (item.value().is_same(parameter)) names.push_back(item.key());
    }
  }
  return names;
}

TEST(DecayGroups, DEC16_biases_and_norms_are_spared) {
  const ManyKindsImpl module;
  const auto split = split_by_decay(module);
  // A tied parameter appears once, and has two names.
  EXPECT_THAT(names_of(module, split.decayed),
              UnorderedElementsAre("head", "embedding.weight", "table", "linear.weight", "gru.weight_ih_l0",
                                   "gru.weight_hh_l0"));
  EXPECT_THAT(names_of(module, split.spared),
              UnorderedElementsAre("bias_k", "scale", "linear.bias", "bn.weight", "bn.bias", "gru.bias_ih_l0",
                                   "gru.bias_hh_l0", "norm_of_pictures.weight", "norm_of_pictures.bias"));
  EXPECT_EQ(split.decayed.size(), 5U);
}

// A submodule under two names, which Module::parameters() lists twice, as does a tied weight.
TEST(DecayGroups, DEC16_muon_and_adamw_get_each_parameter_once) {
  ManyKindsImpl module;
  const auto linear = module.named_children()["linear"];
  module.register_module("shared", linear);
  module.register_module("embedding_again", module.named_children()["embedding"]);
  const auto groups = MuonWithAdamW::groups_of(module);
  ASSERT_EQ(groups.size(), 2U);
  EXPECT_THAT(names_of(module, groups[0].params()),
              UnorderedElementsAre("table", "linear.weight", "shared.weight", "gru.weight_ih_l0", "gru.weight_hh_l0",
                                   "norm_of_pictures.weight", "norm_of_pictures.bias"));
  EXPECT_EQ(groups[0].params().size(), 6U);
  EXPECT_EQ(groups[1].params().size(), 8U) << "embedding, bias_k, scale, biases and norms of one dimension";
}

// With zero gradients, only decay changes parameters.
template <class Optimizer, class Options>
void expect_decay(const Options& options) {
  torch::manual_seed(2);
  ManyKindsImpl module;
  const auto split = split_by_decay(module);
  const auto copy = [](const std::vector<at::Tensor>& list) {
    std::vector<at::Tensor> copies;
    for (const auto& tensor : list) copies.push_back(tensor.detach().clone());
    return copies;
  };
  const auto decayed = copy(split.decayed), spared = copy(split.spared);
  const auto [groups, defaults] = decay_groups(module, options);
  Optimizer optimizer(groups, defaults);
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) parameter.mutable_grad() = at::zeros_like(parameter);
  }
  optimizer.step();
  for (size_t i = 0; i < decayed.size(); ++i) EXPECT_FALSE(at::equal(split.decayed[i], decayed[i])) << i;
  for (size_t i = 0; i < spared.size(); ++i) EXPECT_TRUE(at::equal(split.spared[i], spared[i])) << i;
  const auto decay_of = [&](size_t group) {
    return static_cast<const Options&>(optimizer.param_groups()[group].options()).weight_decay();
  };
  EXPECT_EQ(decay_of(0), options.weight_decay());
  EXPECT_EQ(decay_of(1), 0);
  for (const auto& group : optimizer.param_groups()) EXPECT_EQ(group.options().get_lr(), 0.5);
}

TEST(DecayGroups, DEC16_only_what_decays_shrinks) {
  expect_decay<FusedAdamW>(torch::optim::AdamWOptions(0.5).weight_decay(0.25));
  expect_decay<FusedAdamW>(torch::optim::AdamWOptions(0.5));  // libtorch's own default, which is not 0
  expect_decay<FusedAdam>(torch::optim::AdamOptions(0.5).weight_decay(0.25));
  expect_decay<torch::optim::SGD>(torch::optim::SGDOptions(0.5).weight_decay(0.25));
  expect_decay<AccumAdam>(AccumAdamOptions(0.5).weight_decay(0.25));
  expect_decay<AccumAdamW>(AccumAdamOptions(0.5).weight_decay(0.25));
  expect_decay<Lamb>(LambOptions(0.5).weight_decay(0.25));
}

TEST(DecayGroups, DEC16_a_module_without_either_gives_an_empty_group) {
  torch::nn::Linear linear(torch::nn::LinearOptions(2, 2).bias(false));
  const auto groups = decay_groups(*linear, torch::optim::SGDOptions(0.5).weight_decay(0.25)).groups;
  ASSERT_EQ(groups.size(), 2U);
  EXPECT_THAT(groups[0].params(), testing::SizeIs(1));
  EXPECT_THAT(groups[1].params(), testing::IsEmpty());
}

TEST(DecayGroups, DEC16_a_module_is_given_as_it_is_held_and_an_empty_one_is_refused) {
  const torch::nn::Linear holder(torch::nn::LinearOptions(2, 2));
  const std::shared_ptr<torch::nn::Module> pointer = holder.ptr();
  const auto split = split_by_decay;
  for (const auto& made :
       {split(holder), split(*holder), split(pointer), split(pointer.get()), split(std::cref(*pointer))}) {
    ASSERT_EQ(made.decayed.size(), 1U);
    EXPECT_TRUE(made.decayed.front().is_same(holder->weight));
  }
  const auto refused = testing::ThrowsMessage<UsageError>(testing::HasSubstr("the module is empty"));
  EXPECT_THAT([&] { split(torch::nn::Linear(nullptr)); }, refused);
  EXPECT_THAT([&] { split(std::shared_ptr<torch::nn::Module>()); }, refused);
}

}  // namespace
}  // namespace shoal::decay_groups_test
