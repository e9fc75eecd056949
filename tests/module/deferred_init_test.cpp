#include "shoal/deferred_init.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "shoal/error.h"

namespace shoal::test {
namespace {

// Module that creates values in all ways that constructors use.
struct ManyImpl : torch::nn::Module {
  ManyImpl() {
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, 3)));
    norm = register_module("norm", torch::nn::BatchNorm2d(4));
    embedding = register_module("embedding", torch::nn::Embedding(torch::nn::EmbeddingOptions(7, 5).padding_idx(2)));
    linear = register_module("linear", torch::nn::Linear(5, 7));
    tied = register_parameter("tied", embedding->weight);
    scaled = register_parameter("scaled", at::randn({3, 3}) * 0.02 + 1);
    nothing = register_parameter("nothing", at::empty({0, 4}));
    copy = register_parameter("copy", scaled.detach().clone());
    table = register_buffer("table", at::arange(6, at::kFloat).view({2, 3}).t().contiguous());
    list = register_buffer("list", torch::tensor({1.5F, 2.5F, 3.5F}));
    half = register_buffer("half", at::ones({4}).to(at::kHalf));
    const torch::NoGradGuard no_grad;
    copy.slice(0, 1).zero_();
    conv->bias.index_put_({at::full({1}, 1, at::kLong)}, at::full({}, 5.0F));
  }
  torch::nn::Conv2d conv = nullptr;
  torch::nn::BatchNorm2d norm = nullptr;
  torch::nn::Embedding embedding = nullptr;
  torch::nn::Linear linear = nullptr;
  at::Tensor tied, scaled, nothing, copy, table, list, half;
};

std::vector<at::Tensor> tensors_of(const torch::nn::Module& module) {
  auto list = module.parameters();
  for (const auto& buffer : module.buffers()) list.push_back(buffer);
  return list;
}

std::shared_ptr<ManyImpl> deferred() {
  const DeferredInit no_memory;
  return std::make_shared<ManyImpl>();
}

TEST(DeferredInit, FSDP12_values_are_those_of_the_constructors_bit_by_bit) {
  torch::manual_seed(3);
  const ManyImpl eager;
  const auto model = deferred();
  for (const auto& tensor : tensors_of(*model)) {
    EXPECT_TRUE(is_deferred(tensor));
    EXPECT_TRUE(tensor.is_cpu());
  }
  EXPECT_TRUE(model->tied.is_same(model->embedding->weight));
  torch::manual_seed(3);
  materialize(tensors_of(*model));
  const auto expected = tensors_of(eager), got = tensors_of(*model);
  ASSERT_EQ(expected.size(), got.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_FALSE(is_deferred(got[i]));
    EXPECT_EQ(got[i].requires_grad(), expected[i].requires_grad());
    EXPECT_EQ(got[i].strides(), expected[i].strides());
    EXPECT_TRUE(at::equal(got[i], expected[i])) << i << "\n" << got[i] << expected[i];
  }
  auto output = model->linear->forward(at::ones({1, 5}));
  output.sum().backward();
  EXPECT_TRUE(model->linear->weight.grad().defined());
}

TEST(DeferredInit, FSDP12_parts_come_one_by_one) {
  const auto model = deferred();
  materialize({model->copy});
  EXPECT_FALSE(is_deferred(model->copy));
  EXPECT_FALSE(is_deferred(model->scaled)) << "copy is made of it";
  EXPECT_TRUE(is_deferred(model->conv->weight));
  materialize({model->conv->bias});
  EXPECT_EQ(model->conv->bias[1].item<float>(), 5);
  EXPECT_TRUE(is_deferred(model->conv->weight));
  materialize({model->conv->bias});  // nothing to do
  materialize(tensors_of(*model));
  EXPECT_EQ(model->conv->bias[1].item<float>(), 5);
}

TEST(DeferredInit, FSDP12_what_has_no_values_cannot_be_read) {
  const auto model = deferred();
  EXPECT_THAT([&] { model->scaled.sum(); },
              testing::ThrowsMessage<c10::Error>(testing::HasSubstr("made in a DeferredInit scope and has no values")));
  const DeferredInit no_memory;
  EXPECT_THAT([&] { at::randn({2}).sum().item<float>(); },
              testing::ThrowsMessage<UsageError>(testing::HasSubstr("needs the values of a deferred tensor")));
  EXPECT_THROW(at::tensor(std::vector<float>{1, 2}), c10::Error);
}

TEST(DeferredInit, FSDP12_tensors_with_memory_take_part_and_are_not_written_to) {
  const auto real = at::full({3}, 2.0F);
  at::Tensor product;
  {
    const DeferredInit no_memory;
    EXPECT_EQ((real * 2).sum().item<float>(), 12);
    product = at::ones({3}).mul(real);
    EXPECT_TRUE(is_deferred(product));
    EXPECT_THAT(
        [&] { at::Tensor(real).copy_(at::randn({3})); },
        testing::ThrowsMessage<UsageError>(testing::HasSubstr("writes deferred values to a tensor that has memory")));
  }
  EXPECT_FALSE(is_deferred(at::ones({3}))) << "only inside the scope";
  materialize({product});
  EXPECT_TRUE(at::equal(product, real));
}

TEST(DeferredInit, FSDP12_tensors_with_memory_have_the_values_of_the_moment) {
  auto reused = at::zeros({3});
  at::Tensor first, second;
  {
    const DeferredInit no_memory;
    first = at::empty({3}).copy_(reused.fill_(1));
    second = at::ones({3}).add_(reused.fill_(2));
  }
  {
    std::vector<float> gone{5, 6, 7};
    const DeferredInit no_memory;
    first.add_(at::from_blob(gone.data(), {3}));
    gone.assign(3, 0);
  }
  reused.zero_();
  materialize({first, second});
  EXPECT_TRUE(at::equal(first, at::tensor({6.0F, 7.0F, 8.0F})));
  EXPECT_TRUE(at::equal(second, at::full({3}, 3.0F)));
}

// Each of them comes first once.
TEST(DeferredInit, FSDP12_parts_have_the_values_of_the_moment_whichever_comes_first) {
  for (const size_t first : {0, 1, 2}) {
    std::vector<at::Tensor> made(3);
    {
      const DeferredInit no_memory;
      made[0] = at::ones({2, 2});
      made[1] = made[0] * 2;
      made[0][1].fill_(5);
      made[2] = made[0].t().clone();
    }
    materialize({made[first]});
    materialize({made[0]});
    made[0].zero_();
    materialize(made);
    EXPECT_TRUE(at::equal(made[1], at::full({2, 2}, 2.0F))) << first << made[1];
    EXPECT_TRUE(at::equal(made[2], at::tensor({1.0F, 5.0F, 1.0F, 5.0F}).view({2, 2}))) << first << made[2];
    EXPECT_EQ(made[0].count_nonzero().item<int64_t>(), 0) << first;
  }
}

TEST(DeferredInit, FSDP12_what_is_written_to_a_part_after_others_have_read_it_is_not_lost) {
  at::Tensor read, reader;
  {
    const DeferredInit no_memory;
    read = at::ones({3});
    reader = read * 2;
    read.fill_(4);
  }
  materialize({reader});
  materialize({read});
  EXPECT_TRUE(at::equal(reader, at::full({3}, 2.0F)));
  EXPECT_TRUE(at::equal(read, at::full({3}, 4.0F)));
}

TEST(DeferredInit, FSDP12_operators_without_a_known_shape_run_at_once_or_are_refused_by_name) {
  at::Tensor weight;
  {
    const DeferredInit no_memory;
    EXPECT_THAT([&] { at::multinomial(at::ones({5}), 3); },
                testing::ThrowsMessage<UsageError>(
                    testing::HasSubstr("DeferredInit: aten::multinomial cannot be recorded, because PyTorch")));
    EXPECT_THROW(at::nonzero(at::eye(3)), UsageError);
    const auto order = at::randperm(4);
    EXPECT_FALSE(is_deferred(order));
    weight = at::ones({4, 3});
    weight.index_put_({order.slice(0, 0, 2)}, at::zeros({2, 3}));
  }
  materialize({weight});
  EXPECT_EQ(weight.sum().item<float>(), 6);
}

// libtorch has no kernel for the meta device for most of these.
TEST(DeferredInit, FSDP12_operators_that_run_to_show_their_shape_are_recorded) {
  const auto random = [](at::IntArrayRef shape) { return at::rand(shape); };
  const auto square = [&] {
    const auto a = random({4, 4});
    return a.mm(a.t()) + at::eye(4);
  };
  const std::vector<std::pair<std::string, std::function<at::Tensor()>>> operators{
      {"polar", [&] { return at::view_as_real(at::polar(at::ones({3}), random({3}))); }},
      {"where",
       [&] {
         const auto u = random({5});
         return at::where(u > 0.5, u, -u);
       }},
      {"std",
       [&] {
         return random({5, 3}).std(0);
       }},
      {"var",
       [&] {
         return random({5, 3}).var(1);
       }},
      {"flip",
       [&] {
         return random({6, 2}).t().flip(0);
       }},
      {"roll", [&] { return random({6}).roll(2); }},
      {"logical_and", [&] { return (random({6}) > 0.2).logical_and(at::ones({6})); }},
      {"conv2d",
       [&] {
         return at::conv2d(random({1, 1, 4, 4}), random({2, 1, 3, 3}));
       }},
      {"fft", [&] { return at::view_as_real(at::fft_fft(random({4}))); }},
      {"cdist",
       [&] {
         return at::cdist(random({3, 2}), random({4, 2}));
       }},
      {"median", [&] { return random({5}).median(); }},
      {"searchsorted", [&] { return at::searchsorted(at::arange(5), at::full({1}, 2)); }},
      {"pinv",
       [&] {
         return at::linalg_pinv(random({4, 3}));
       }},
      {"matrix_exp", [&] { return at::linalg_matrix_exp(square() * 0.1); }},
      {"inverse", [&] { return at::linalg_inv(square()); }},
      {"cholesky", [&] { return at::linalg_cholesky(square()); }},
  };
  for (const auto& [name, run] : operators) {
    torch::manual_seed(3);
    const auto eager = run();
    torch::manual_seed(3);
    at::Tensor later;
    {
      const DeferredInit no_memory;
      later = run();
    }
    EXPECT_TRUE(is_deferred(later)) << name;
    materialize({later});
    EXPECT_EQ(later.scalar_type(), eager.scalar_type()) << name;
    EXPECT_EQ(later.strides(), eager.strides()) << name;
    EXPECT_TRUE(at::equal(later, eager)) << name << ": " << later << " instead of " << eager;
  }
}

TEST(DeferredInit, FSDP12_a_check_of_values_runs_with_them) {
  at::Tensor inverse;
  {
    const DeferredInit no_memory;
    inverse = at::linalg_inv(at::zeros({2, 2}));
  }
  EXPECT_THROW(materialize({inverse}), c10::LinAlgError);
}

TEST(DeferredInit, FSDP12_another_dtype_is_deferred_as_well) {
  torch::manual_seed(3);
  const torch::nn::Linear eager(4, 4);
  std::optional<torch::nn::Linear> model;
  at::Tensor original;
  {
    const DeferredInit no_memory;
    model.emplace(4, 4);
    original = (*model)->weight.detach();
    (*model)->weight.set_data(original.to(at::kBFloat16));
  }
  torch::manual_seed(3);
  materialize({(*model)->weight, original});
  EXPECT_TRUE(at::equal(original, eager->weight));
  EXPECT_TRUE(at::equal((*model)->weight, eager->weight.to(at::kBFloat16)));
}

}  // namespace
}  // namespace shoal::test
