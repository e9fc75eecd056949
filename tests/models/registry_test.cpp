#include "models/registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "models/loss.h"
#include "shoal/error.h"
#include "tests/support/refusal.h"

namespace shoal::models {
namespace {

using test::refusal;

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Property;

TEST(ModelRegistry, lists_names_and_sizes) {
  EXPECT_THAT(model_names(), ElementsAre("mlp", "cnn", "gpt"));
  EXPECT_THAT(model_sizes("mlp"), ElementsAre("tiny", "small"));
  EXPECT_THAT(model_sizes("gpt"), ElementsAre("tiny", "small", "large", "gpt2"));
}

TEST(ModelRegistry, lists_the_choices_for_an_unknown_name) {
  EXPECT_THAT(refusal([] { make_model("vgg", "tiny", Init::torch, 1); }),
              AllOf(HasSubstr("'vgg'"), HasSubstr("mlp, cnn, gpt")));
  EXPECT_THAT(refusal([] { make_model("mlp", "huge", Init::torch, 1); }),
              AllOf(HasSubstr("size of mlp 'huge'"), HasSubstr("tiny, small")));
  EXPECT_THAT(refusal([] { require_model("gpt", ""); }), HasSubstr("tiny, small, large, gpt2"));
  EXPECT_THAT(refusal([] { gpt_config("huge"); }), HasSubstr("tiny, small, large, gpt2"));
}

TEST(ModelRegistry, gpt2_has_its_published_sizes) {
  const auto config = gpt_config("gpt2");
  EXPECT_EQ(config.layers, 12);
  EXPECT_EQ(config.heads, 12);
  EXPECT_EQ(config.width, 768);
  EXPECT_EQ(config.context, 1024);
}

std::vector<at::Tensor> values(const std::shared_ptr<Model>& model) {
  std::vector<at::Tensor> list;
  for (const auto& parameter : model->parameters()) list.push_back(parameter.detach());
  return list;
}

bool equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) { return x.equal(y); });
}

TEST(ModelRegistry, the_seed_decides_the_parameters) {
  for (const Init init : {Init::torch, Init::reference}) {
    const auto first = values(make_model("mlp", "tiny", init, 1));
    EXPECT_TRUE(equal(first, values(make_model("mlp", "tiny", init, 1))));
    EXPECT_FALSE(equal(first, values(make_model("mlp", "tiny", init, 2))));
  }
}

TEST(ModelRegistry, leaves_the_default_generator_alone) {
  torch::manual_seed(3);
  const auto expected = at::rand({4});
  torch::manual_seed(3);
  make_model("mlp", "tiny", Init::torch, 1);
  EXPECT_TRUE(at::rand({4}).equal(expected));
}

TEST(ModelRegistry, casts_floating_point_tensors_only) {
  const auto single = make_model("cnn", "tiny", Init::reference, 1);
  const auto model = make_model("cnn", "tiny", Init::reference, 1, at::kDouble);
  for (const auto& item : model->named_parameters()) {
    EXPECT_EQ(item.value().scalar_type(), at::kDouble);
    EXPECT_TRUE(item.value().equal(single->named_parameters()[item.key()].to(at::kDouble)));
    EXPECT_TRUE(item.value().requires_grad());
  }
  EXPECT_EQ(model->named_buffers()["stage1.bn.running_mean"].scalar_type(), at::kDouble);
  EXPECT_EQ(model->named_buffers()["stage1.bn.num_batches_tracked"].scalar_type(), at::kLong);
  const auto logits = model->forward(at::zeros({2, 784}, at::kDouble));
  EXPECT_EQ(logits.scalar_type(), at::kDouble);
}

TEST(ModelRegistry, torch_init_of_gpt_starts_near_a_uniform_guess) {
  const auto model = make_model("gpt", "tiny", Init::torch, 1);
  const auto tokens = at::arange(64, at::kLong).view({2, 32});
  EXPECT_NEAR(loss_of(model->forward(tokens), tokens).item<float>(), std::log(256), 0.5);
}

}  // namespace
}  // namespace shoal::models
