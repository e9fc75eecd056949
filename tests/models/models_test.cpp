// Models compared with their Python definition.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include "models/cnn.h"
#include "models/gpt.h"
#include "models/loss.h"
#include "models/registry.h"
#include "shoal/error.h"
#include "tests/models/vectors.h"

namespace shoal::models {
namespace {

class ReferenceModel : public testing::TestWithParam<ModelVector> {};

TEST_P(ReferenceModel, has_the_parameters_of_the_definition) {
  const auto& [name, size, numel, count, vectors] = GetParam();
  const auto model = make_model(name, size, Init::reference, 1);
  const auto parameters = model->named_parameters();
  int64_t total = 0;
  for (const auto& item : parameters) total += item.value().numel();
  EXPECT_EQ(total, numel);
  ASSERT_EQ(parameters.size(), count);
  for (const auto& expected : vectors) {
    SCOPED_TRACE(expected.name);
    const auto& item = parameters[expected.place];
    EXPECT_EQ(item.key(), expected.name);
    EXPECT_EQ(item.value().sizes().vec(), expected.shape);
    EXPECT_TRUE(item.value().is_contiguous());
    const auto values = item.value().detach().flatten();
    for (int64_t i = 0; i < 3; ++i) EXPECT_EQ(values[i].item<float>(), expected.first[i]) << "element " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(All, ReferenceModel, testing::ValuesIn(model_vectors()),
                         [](const auto& info) { return info.param.model + "_" + info.param.size; });

at::Tensor tokens(int64_t batch, int64_t time) {
  return at::arange(batch * time, at::kLong).view({batch, time}) % 256;
}

TEST(Cnn, has_batch_norm_buffers_in_the_order_of_the_definition) {
  std::vector<std::string> names;
  const auto model = make_model("cnn", "tiny", Init::reference, 1);
  for (const auto& item : model->named_buffers()) names.push_back(item.key());
  EXPECT_THAT(names,
              testing::ElementsAre("stage1.bn.running_mean", "stage1.bn.running_var", "stage1.bn.num_batches_tracked",
                                   "stage2.bn.running_mean", "stage2.bn.running_var", "stage2.bn.num_batches_tracked"));
}

TEST(Gpt, masks_the_future) {
  const auto model = make_model("gpt", "tiny", Init::reference, 1);
  auto input = tokens(2, 32);
  const auto before = model->forward(input);
  input.select(1, 31).add_(1).remainder_(256);
  const auto after = model->forward(input);
  EXPECT_TRUE(before.narrow(1, 0, 31).allclose(after.narrow(1, 0, 31)));
  EXPECT_FALSE(before.select(1, 31).allclose(after.select(1, 31)));
}

TEST(Gpt, takes_shorter_sequences_only) {
  const auto model = make_model("gpt", "tiny", Init::reference, 1);
  EXPECT_THAT(model->forward(tokens(2, 5)).sizes(), testing::ElementsAre(2, 5, 256));
  EXPECT_THROW(model->forward(tokens(2, 33)), UsageError);
}

TEST(Gpt, ties_the_head_to_the_token_embedding) {
  const auto model = make_model("gpt", "tiny", Init::reference, 1);
  auto weight = model->named_parameters()["wte.weight"];
  model->forward(tokens(1, 4)).sum().backward();
  // Tokens that are not in the input have a gradient as outputs.
  EXPECT_GT(weight.grad()[200].abs().sum().item<float>(), 0);
}

TEST(Model, names_its_units_in_the_order_of_use) {
  EXPECT_EQ(make_model("mlp", "tiny", Init::torch, 1)->units().size(), 3u);
  EXPECT_EQ(make_model("cnn", "tiny", Init::torch, 1)->units().size(), 3u);
  const auto gpt = make_model("gpt", "tiny", Init::torch, 1);
  ASSERT_EQ(gpt->units().size(), 2u);
  EXPECT_NE(gpt->units()[0]->as<BlockImpl>(), nullptr);
}

}  // namespace
}  // namespace shoal::models
