// FSDP05: floating-point inputs are cast to the parameters' dtype, wherever they are.

#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include "tests/strategy/fsdp/fsdp_training.h"

namespace shoal::test::fsdp_inputs_test {
namespace {

struct Sample {
  at::Tensor image;
  at::Tensor label;
  std::string name;
};

}  // namespace
}  // namespace shoal::test::fsdp_inputs_test

template <>
struct shoal::InputTensors<shoal::test::fsdp_inputs_test::Sample> {
  static test::fsdp_inputs_test::Sample cast(const test::fsdp_inputs_test::Sample& sample, const TensorCast& cast) {
    return {cast_tensors(sample.image, cast), cast_tensors(sample.label, cast), sample.name};
  }
};

namespace shoal::test::fsdp_inputs_test {
namespace {

struct TakesAllImpl : torch::nn::Module {
  TakesAllImpl() { weight = register_parameter("weight", at::ones({3})); }

  // Sums tensors of the weight's dtype, and counts tensors of other dtypes.
  at::Tensor forward(const at::Tensor& bare, const std::vector<at::Tensor>& list,
                     const std::map<std::string, std::vector<at::Tensor>>& map,
                     std::tuple<at::Tensor, std::pair<int, at::Tensor>> tuple, const std::optional<at::Tensor>& maybe,
                     const Sample& sample, std::vector<at::Tensor>& cache, std::unique_ptr<int> number) {
    std::vector<at::Tensor> all{bare, std::get<0>(tuple), std::get<1>(tuple).second, sample.image};
    all.insert(all.end(), list.begin(), list.end());
    for (const auto& [key, values] : map) all.insert(all.end(), values.begin(), values.end());
    if (maybe) all.push_back(*maybe);
    others = 0;
    auto sum = weight * *number;
    for (const auto& tensor : all) {
      others += tensor.scalar_type() == weight.scalar_type() ? 0 : 1;
      sum = sum + tensor;
    }
    EXPECT_EQ(sample.label.scalar_type(), at::kLong);
    cache.push_back(sum.detach());
    return sum;
  }

  at::Tensor weight;
  int others = 0;
};

TEST(Fsdp, FSDP05_inputs_in_containers_and_structs_are_cast_and_the_callers_objects_stay) {
  for (const auto dtype : {std::optional<at::ScalarType>(), std::optional(at::kBFloat16)}) {
    FullyShardedDataParallel<TakesAllImpl> parallel(std::make_shared<TakesAllImpl>(), group(), {.param_dtype = dtype});
    const auto x = at::ones({3});
    std::vector<at::Tensor> list{x, x};
    std::map<std::string, std::vector<at::Tensor>> map{{"a", {x}}, {"b", {x, x}}};
    const std::optional<at::Tensor> maybe = x;
    const Sample sample{x, at::ones({3}, at::kLong), "first"};
    std::vector<at::Tensor> cache{x};
    const auto sum =
        parallel.forward(x, list, map, std::tuple(x, std::pair(1, x)), maybe, sample, cache, std::make_unique<int>(2));
    EXPECT_EQ(parallel->others, 0);
    EXPECT_EQ(sum.scalar_type(), dtype.value_or(at::kFloat));
    EXPECT_EQ(sum.detach().to(at::kFloat).sum().item<float>(), 3 * (2 + 10));
    for (const auto& tensor : {list[0], map.at("b")[1], *maybe, sample.image, cache[0]}) {
      EXPECT_TRUE(tensor.is_same(x)) << "the caller's";
    }
    ASSERT_EQ(cache.size(), 2U) << "what forward may write to is passed as it is";
    EXPECT_EQ(cache[1].scalar_type(), dtype.value_or(at::kFloat));
    sum.sum().backward();
  }
}

// Forward that changes objects of the caller, and tensors in place.
struct WritesImpl : torch::nn::Module {
  WritesImpl() { weight = register_parameter("weight", at::ones({3})); }
  at::Tensor forward(at::Tensor& x) {
    x = x + 1;
    return x * weight;
  }
  at::Tensor weight;
};

TEST(Fsdp, FSDP05_an_argument_that_forward_writes_to_is_the_callers) {
  FullyShardedDataParallel<WritesImpl> parallel(std::make_shared<WritesImpl>(), group(),
                                                {.param_dtype = at::kBFloat16});
  auto x = at::ones({3});
  parallel.forward(x).sum().backward();
  EXPECT_EQ(x.sum().item<float>(), 6);
}

}  // namespace
}  // namespace shoal::test::fsdp_inputs_test
