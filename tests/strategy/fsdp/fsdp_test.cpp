// FullyShardedDataParallel, beyond strategies_test.cpp, zoo_test.cpp and faults_test.cpp: units, and where parameters
// may be read.

#include <gtest/gtest.h>
#include <torch/autograd.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>

#include <set>

#include "shoal/error.h"
#include "tests/strategy/fsdp/fsdp_training.h"

namespace shoal::test::fsdp_test {
namespace {

TEST(Fsdp, FSDP02_policies_divide_a_module_into_units) {
  const auto units = [](const std::optional<WrapPolicy>& policy) {
    return FullyShardedDataParallel<MlpImpl>(make_mlp(), group(), {.auto_wrap_policy = policy}).units();
  };
  const std::vector<std::string> first{"first.weight", "first.bias"};
  const std::vector<std::string> second{"second.weight", "second.bias"};
  const std::vector<std::string> third{"third.weight", "third.bias"};
  using Units = std::vector<std::vector<std::string>>;
  const auto joined = [](std::vector<std::string> a, const std::vector<std::string>& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  };
  EXPECT_EQ(units(std::nullopt), (Units{joined(joined(first, second), third)}));
  EXPECT_EQ(units(wrap_type<torch::nn::LinearImpl>()), (Units{first, second, third}));
  EXPECT_EQ(units(wrap_names({"second"})), (Units{joined(first, third), second}));
  EXPECT_EQ(units(wrap_size(250)), (Units{joined(first, third), second})) << "208, 272 and 85 elements";
  EXPECT_EQ(units(wrap_if([](const std::string& name, const torch::nn::Module&) { return name != "first"; })),
            (Units{first, second, third}));
  EXPECT_THROW(units(wrap_names({"fourth"})), UsageError);
  EXPECT_THROW(wrap_size(0), UsageError);
}

struct NestedImpl : torch::nn::Module {
  NestedImpl() {
    inner = register_module("inner", Mlp());
    head = register_module("head", torch::nn::Linear(5, 2));
  }
  at::Tensor forward(const at::Tensor& x) { return head(inner(x)); }
  Mlp inner{nullptr};
  torch::nn::Linear head{nullptr};
};

TEST(Fsdp, FSDP02_a_parameter_belongs_to_the_innermost_unit) {
  FullyShardedDataParallel<NestedImpl> parallel(std::make_shared<NestedImpl>(), group(),
                                                {.auto_wrap_policy = wrap_names({"inner", "inner.second"})});
  using Units = std::vector<std::vector<std::string>>;
  EXPECT_EQ(parallel.units(),
            (Units{{"inner.first.weight", "inner.first.bias", "inner.third.weight", "inner.third.bias"},
                   {"inner.second.weight", "inner.second.bias"},
                   {"head.weight", "head.bias"}}));
}

struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    embedding = register_module("embedding", torch::nn::Embedding(16, 12));
    hidden = register_module("hidden", torch::nn::Linear(12, 12));
    head = register_parameter("head", embedding->weight);
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    return torch::tanh(hidden(torch::tanh(x.matmul(embedding->weight.t())).matmul(head)));
  }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::Linear hidden{nullptr};
  at::Tensor head;
};

TEST(Fsdp, FSDP03_a_weight_with_two_names_in_two_units_stays_one) {
  const auto make = [] {
    torch::manual_seed(3);
    return std::make_shared<TiedImpl>();
  };
  Options options{.auto_wrap_policy = wrap_names({"embedding", "hidden"})};
  expect_equal_training<TiedImpl>(
      make, [](auto& model, TiedImpl&, const at::Tensor& x) { return mean_loss(model.forward(x)); }, options);
  FullyShardedDataParallel<TiedImpl> parallel(make(), group(), options);
  EXPECT_TRUE(parallel->head.is_same(parallel->embedding->weight));
  EXPECT_EQ(parallel.units().size(), 2U);
}

TEST(Fsdp, FSDP21_weights_may_be_read_outside_forward_twice_and_in_the_loss) {
  expect_equal_training<MlpImpl>(make_mlp, [](auto& model, MlpImpl& module, const at::Tensor& x) {
    at::Tensor penalty = at::zeros({}, at::kDouble);
    for (const auto& parameter : module.parameters()) penalty = penalty + parameter.pow(2).sum();
    const auto twice = model.forward(x).pow(2).mean() + model.forward(2 * x).pow(2).mean();
    return twice + 0.01 * penalty + module.first->weight.abs().mean();
  });
}

// Reads weights in a method other than forward.
TEST(Fsdp, FSDP21_weights_may_be_read_in_a_method_of_ones_own) {
  expect_equal_training<MlpImpl>(make_mlp, [](auto&, MlpImpl& module, const at::Tensor& x) {
    return torch::tanh(module.second(torch::tanh(module.first(x)))).pow(2).mean() + module.third->bias.sum();
  });
}

// Recomputes a block in backward instead of storing its activations.
struct Recomputed : torch::autograd::Function<Recomputed> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, torch::nn::Linear block) {
    context->save_for_backward({x});
    context->saved_data["block"] = reinterpret_cast<int64_t>(block.get());
    const torch::NoGradGuard no_grad;
    return torch::tanh(block(x));
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const at::AutoGradMode grad(true);
    const auto x = context->get_saved_variables()[0].detach().requires_grad_(true);
    auto* block = reinterpret_cast<torch::nn::LinearImpl*>(context->saved_data["block"].toInt());
    torch::tanh(block->forward(x)).backward(gradients[0]);
    return {x.grad(), at::Tensor()};
  }
};

struct RecomputingImpl : MlpImpl {
  at::Tensor forward(const at::Tensor& x) {
    const auto y = Recomputed::apply(torch::tanh(first(x)), second);
    return third(y);
  }
};

TEST(Fsdp, FSDP21_a_block_may_be_recomputed_in_backward) {
  const auto make = [] {
    torch::manual_seed(1);
    return std::make_shared<RecomputingImpl>();
  };
  expect_equal_training<RecomputingImpl>(
      make, [](auto& model, RecomputingImpl&, const at::Tensor& x) { return mean_loss(model.forward(x)); });
}

TEST(Fsdp, FSDP21_evaluation_and_reading_without_gradients_see_the_present_weights) {
  FullyShardedDataParallel<MlpImpl> parallel(make_mlp(), group(), by_layer());
  FullyShardedOptimizer<torch::optim::SGD> optimizer(parallel, sgd);
  auto reference = seeded(1);
  torch::optim::SGD reference_optimizer(reference->parameters(), sgd);
  for (int64_t step = 0; step < 3; ++step) {
    {
      const torch::NoGradGuard no_grad;
      EXPECT_LT(difference({parallel.forward(batch(0, 9))}, {reference->forward(batch(0, 9))}), 1e-12);
      EXPECT_LT(difference({parallel->second->weight.t().clone()}, {reference->second->weight.t()}), 1e-12);
    }
    mean_loss(parallel.forward(batch(0, step))).backward();
    optimizer.step();
    optimizer.zero_grad();
    mean_loss(reference->forward(batch(0, step))).backward();
    reference_optimizer.step();
    reference_optimizer.zero_grad();
  }
}

TEST(Fsdp, FSDP21_data_ptr_of_what_is_not_there_is_an_error_that_says_what_to_do) {
  FullyShardedDataParallel<MlpImpl> parallel(make_mlp(), group(), by_layer());
  if (!parallel.shared()) {
    try {
      parallel->second->weight.data_ptr<double>();
      FAIL() << "no error";
    } catch (const c10::Error& error) {
      EXPECT_NE(std::string(error.what()).find("unit second is sharded and not in memory"), std::string::npos)
          << error.what();
      EXPECT_NE(std::string(error.what()).find("summon_full_params"), std::string::npos);
    }
  }
  const auto whole = parallel.summon_full_params();
  EXPECT_EQ(parallel->second->weight.data_ptr<double>()[0], seeded(1)->second->weight.data_ptr<double>()[0]);
  EXPECT_THROW(parallel.forward(batch(0, 0)), UsageError) << "forward while parameters are held";
}

TEST(Fsdp, FSDP18_what_is_written_in_summon_full_params_is_seen_everywhere) {
  FullyShardedDataParallel<MlpImpl> parallel(make_mlp(), group(), by_layer());
  const auto bias = [&] { return parallel->first->bias.detach().clone(); };
  const auto before = bias();
  {
    const auto whole = parallel.summon_full_params(/*writeback=*/false);
    const torch::NoGradGuard no_grad;
    parallel->first->bias.fill_(5);
    EXPECT_EQ(bias().sum().item<double>(), 80);
  }
  EXPECT_TRUE(at::equal(bias(), before)) << "without writeback changes are lost";
  {
    const auto whole = parallel.summon_full_params();
    const torch::NoGradGuard no_grad;
    parallel->first->bias.fill_(7);
  }
  EXPECT_EQ(bias().sum().item<double>(), 112);
  // The optimizer continues from there.
  FullyShardedOptimizer<torch::optim::SGD> optimizer(parallel, SGDOptions(0.5));
  parallel->first->bias.sum().backward();
  optimizer.step();
  EXPECT_EQ(bias().sum().item<double>(), 104);
}

TEST(Fsdp, FSDP19_every_parameter_that_is_not_ignored_is_divided) {
  auto options = by_layer();
  options.ignored_parameters = {"second.bias"};
  const auto model = make_mlp();
  FullyShardedDataParallel<MlpImpl> parallel(model, group(), options);
  std::set<std::string> divided;
  for (const auto& unit : parallel.units()) divided.insert(unit.begin(), unit.end());
  for (const auto& item : model->named_parameters()) {
    EXPECT_EQ(divided.count(item.key()), item.key() == "second.bias" ? 0U : 1U) << item.key();
  }
}

TEST(Fsdp, FSDP10_ignored_modules_and_parameters_stay_as_they_are) {
  auto options = by_layer();
  options.ignored_modules = {"second"};
  options.ignored_parameters = {"third.bias"};
  FullyShardedDataParallel<MlpImpl> parallel(make_mlp(), group(), options);
  using Units = std::vector<std::vector<std::string>>;
  EXPECT_EQ(parallel.units(), (Units{{"first.weight", "first.bias"}, {"third.weight"}}));
  mean_loss(parallel.forward(batch(group().rank(), 0))).backward();
  EXPECT_TRUE(parallel->second->weight.grad().defined());
  EXPECT_TRUE(parallel->third->bias.grad().defined());
  EXPECT_THROW(parallel->first->weight.grad().sum(), UsageError) << "a stand-in";
  options.ignored_modules = {"fourth"};
  EXPECT_THROW(FullyShardedDataParallel<MlpImpl>(make_mlp(), group(), options), UsageError);
}

TEST(Fsdp, FSDP22_a_part_that_is_sharded_already_is_left_to_its_own_wrapper) {
  auto model = seeded(1);
  FullyShardedDataParallel<torch::nn::LinearImpl> inner(model->second, group());
  FullyShardedDataParallel<MlpImpl> outer(model, group(), by_layer());
  using Units = std::vector<std::vector<std::string>>;
  EXPECT_EQ(outer.units(), (Units{{"first.weight", "first.bias"}, {"third.weight", "third.bias"}}));
  EXPECT_THROW(FullyShardedDataParallel<torch::nn::LinearImpl>(model->second, group()), UsageError);
  EXPECT_THROW(FullyShardedDataParallel<MlpImpl>(model, group()), UsageError);
}

}  // namespace
}  // namespace shoal::test::fsdp_test
