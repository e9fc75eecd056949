// FullyShardedDataParallel, beyond what strategies_test.cpp, zoo_test.cpp and faults_test.cpp show: what may be read
// where, units, state, precision.

#include "shoal/strategy/fsdp.h"

#include <torch/autograd.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "engine/gradient_norm.h"
#include "shoal/base/error.h"
#include "shoal/optim/fused_adamw.h"
#include "shoal/strategy/ddp.h"
#include "tests/support/models.h"
#include "tests/support/training.h"
#include "tests/support/world.h"

namespace shoal {
namespace {

using test::batch;
using test::difference;
using test::mean_loss;
using test::Mlp;
using test::MlpImpl;
using test::seeded;
using test::world;
using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;
using Options = FullyShardedDataParallelOptions;

const Group& group() {
  return world().group();
}

const SGDOptions sgd = SGDOptions(0.1).momentum(0.9);

// Every layer a unit.
Options by_layer() {
  return {.auto_wrap_policy = wrap_type<torch::nn::LinearImpl>()};
}

// Trains a model that forward() and loss() know, sharded and, with all ranks' batches, in one process; compares.
template <class Module, class Loss>
void expect_equal_training(const std::function<std::shared_ptr<Module>()>& make, const Loss& loss,
                           const Options& options = by_layer(), int steps = 4) {
  FullyShardedDataParallel<Module> parallel(make(), group(), options);
  FullyShardedOptimizer<torch::optim::SGD> optimizer(parallel, sgd);
  const auto reference = make();
  torch::optim::SGD reference_optimizer(test::distinct(reference->parameters()), sgd);
  for (int64_t step = 0; step < steps; ++step) {
    loss(parallel, *parallel.module(), batch(group().rank(), step)).backward();
    optimizer.step();
    optimizer.zero_grad();
    for (int rank = 0; rank < group().size(); ++rank) {
      (loss(*reference, *reference, batch(rank, step)) / group().size()).backward();
    }
    reference_optimizer.step();
    reference_optimizer.zero_grad();
    ASSERT_LT(difference(parallel.module()->parameters(), reference->parameters()), 1e-12) << "step " << step;
  }
}

std::shared_ptr<MlpImpl> make_mlp() {
  return seeded(1).ptr();
}

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

// A method of its own, not forward.
TEST(Fsdp, FSDP21_weights_may_be_read_in_a_method_of_ones_own) {
  expect_equal_training<MlpImpl>(make_mlp, [](auto&, MlpImpl& module, const at::Tensor& x) {
    return torch::tanh(module.second(torch::tanh(module.first(x)))).pow(2).mean() + module.third->bias.sum();
  });
}

// Recomputes a block in backward instead of keeping what it computed.
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
      EXPECT_NE(std::string(error.what()).find("unit second is not in memory"), std::string::npos) << error.what();
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
  // And the optimizer goes on from there.
  FullyShardedOptimizer<torch::optim::SGD> optimizer(parallel, SGDOptions(0.5));
  parallel->first->bias.sum().backward();
  optimizer.step();
  EXPECT_EQ(bias().sum().item<double>(), 104);
}

struct LoraImpl : torch::nn::Module {
  LoraImpl() {
    base = register_module("base", torch::nn::Linear(12, 16));
    down = register_module("down", torch::nn::Linear(12, 3));
    up = register_module("up", torch::nn::Linear(3, 16));
    to(at::kDouble);
    base->weight.set_requires_grad(false);
  }
  at::Tensor forward(const at::Tensor& x) { return torch::tanh(base(x)) + up(down(x)); }
  torch::nn::Linear base{nullptr}, down{nullptr}, up{nullptr};
};

TEST(Fsdp, FSDP04_frozen_and_trainable_parameters_share_a_unit_and_groups_keep_their_options) {
  const auto make = [] {
    torch::manual_seed(2);
    return std::make_shared<LoraImpl>();
  };
  const auto groups_of = [](LoraImpl& model) {
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<at::Tensor>{model.base->bias, model.up->bias, model.down->bias},
                        std::make_unique<AdamWOptions>(AdamWOptions(1e-2).weight_decay(0)));
    groups.emplace_back(std::vector<at::Tensor>{model.up->weight, model.down->weight},
                        std::make_unique<AdamWOptions>(AdamWOptions(1e-2).weight_decay(0.5)));
    return groups;
  };
  FullyShardedDataParallel<LoraImpl> parallel(make(), group());
  FullyShardedOptimizer<torch::optim::AdamW> optimizer(parallel, groups_of(*parallel.module()), AdamWOptions(1e-2));
  const auto reference = make();
  torch::optim::AdamW reference_optimizer(groups_of(*reference), AdamWOptions(1e-2));
  for (int64_t step = 0; step < 4; ++step) {
    mean_loss(parallel.forward(batch(group().rank(), step))).backward();
    optimizer.step();
    optimizer.zero_grad();
    for (int rank = 0; rank < group().size(); ++rank) {
      (mean_loss(reference->forward(batch(rank, step))) / group().size()).backward();
    }
    reference_optimizer.step();
    reference_optimizer.zero_grad();
  }
  EXPECT_LT(difference(parallel.module()->parameters(), reference->parameters()), 1e-10);
  EXPECT_FALSE(parallel->base->weight.requires_grad());
  EXPECT_TRUE(at::equal(parallel->base->weight, make()->base->weight)) << "frozen";
}

TEST(Fsdp, FSDP05_parameters_of_16_bits_have_float32_copies_where_they_are_updated) {
  auto exact = seeded(1);
  exact->to(at::kFloat);
  auto model = seeded(1);
  model->to(at::kFloat);
  auto options = by_layer();
  options.param_dtype = at::kBFloat16;
  options.reduce_dtype = at::kFloat;
  FullyShardedDataParallel<MlpImpl> parallel(model, group(), options);
  FullyShardedOptimizer<torch::optim::SGD> optimizer(parallel, SGDOptions(1e-4));
  EXPECT_EQ(parallel->first->weight.scalar_type(), at::kBFloat16);
  const auto start = parallel.full_state_dict();
  EXPECT_TRUE(at::equal(start.at("first.weight"), exact->first->weight)) << "not rounded";
  for (int64_t step = 0; step < 20; ++step) {
    const auto output = parallel.forward(batch(group().rank(), step).to(at::kFloat));
    EXPECT_EQ(output.scalar_type(), at::kBFloat16) << "inputs are cast";
    mean_loss(output).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  // Steps far below what bfloat16 can show have added up.
  const auto after = parallel.full_state_dict();
  const auto moved = (after.at("third.bias") - start.at("third.bias")).abs().max().item<double>();
  EXPECT_GT(moved, 0);
  EXPECT_LT(moved, 1e-2);
  EXPECT_EQ(after.at("third.bias").scalar_type(), at::kFloat);
  EXPECT_TRUE(at::equal(parallel->third->bias, after.at("third.bias").to(at::kBFloat16)));
}

// Two buffers of one short name, of different dtypes.
struct TwoBuffersImpl : torch::nn::Module {
  struct PartImpl : torch::nn::Module {
    explicit PartImpl(at::ScalarType dtype) {
      linear = register_module("linear", torch::nn::Linear(5, 5));
      scale = register_buffer("scale", at::full({5}, 1.0 / 3, dtype));
      count = register_buffer("count", at::zeros({1}, at::kLong));
    }
    torch::nn::Linear linear = nullptr;
    at::Tensor scale, count;
  };
  TwoBuffersImpl() {
    a = register_module("a", std::make_shared<PartImpl>(at::kFloat));
    b = register_module("b", std::make_shared<PartImpl>(at::kDouble));
  }
  at::Tensor forward(const at::Tensor& x) { return b->linear(a->linear(x) * a->scale) * b->scale; }
  std::shared_ptr<PartImpl> a, b;
};

TEST(Fsdp, FSDP05_buffers_have_a_dtype_of_their_own_and_go_back_to_it) {
  FullyShardedDataParallel<TwoBuffersImpl> parallel(
      std::make_shared<TwoBuffersImpl>(), group(),
      {.auto_wrap_policy = wrap_type<torch::nn::LinearImpl>(), .param_dtype = at::kHalf, .buffer_dtype = at::kHalf});
  EXPECT_EQ(parallel.module()->a->scale.scalar_type(), at::kHalf);
  EXPECT_EQ(parallel.module()->b->scale.scalar_type(), at::kHalf);
  EXPECT_EQ(parallel.module()->b->count.scalar_type(), at::kLong);
  EXPECT_EQ(parallel.forward(at::ones({2, 5})).scalar_type(), at::kHalf);
  const auto state = parallel.full_state_dict();
  EXPECT_EQ(state.at("a.scale").scalar_type(), at::kFloat);
  EXPECT_EQ(state.at("b.scale").scalar_type(), at::kDouble);
  EXPECT_EQ(state.at("b.count").scalar_type(), at::kLong);
}

TEST(Fsdp, FSDP06_cpu_offload_changes_nothing_for_a_model_on_the_cpu) {
  auto options = by_layer();
  options.cpu_offload = true;
  expect_equal_training<MlpImpl>(
      make_mlp, [](auto& model, MlpImpl&, const at::Tensor& x) { return mean_loss(model.forward(x)); }, options);
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

struct TwoWaysImpl : torch::nn::Module {
  TwoWaysImpl() {
    for (const auto* name : {"a", "b", "c"}) layers.push_back(register_module(name, torch::nn::Linear(5, 5)));
    to(at::kDouble);
  }
  at::Tensor forward(at::Tensor x) {
    for (size_t i = 0; i < layers.size(); ++i) x = layers[backwards ? layers.size() - 1 - i : i](x);
    return x;
  }
  std::vector<torch::nn::Linear> layers;
  bool backwards = false;
};

TEST(Fsdp, FSDP09_ranks_that_use_units_in_different_orders_are_told_if_they_want_to_know) {
  auto options = by_layer();
  options.check_unit_order = true;
  options.unit_limit = 2;
  FullyShardedDataParallel<TwoWaysImpl> parallel(std::make_shared<TwoWaysImpl>(), group(), options);
  if (parallel.shared()) GTEST_SKIP() << "nothing is gathered here";
  const auto pass = [&](bool backwards) {
    parallel.module()->backwards = backwards;
    const torch::NoGradGuard no_grad;
    parallel.forward(at::ones({2, 5}, at::kDouble));
  };
  pass(false);
  pass(false);
  pass(group().rank() == 1);
  try {
    pass(false);
    ADD_FAILURE() << "not told";
  } catch (const DisagreeError& error) {
    EXPECT_NE(std::string(error.what()).find("the order in which units are used"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("unit a"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("rank 1"), std::string::npos) << error.what();
  }
}

// Gradients whole on every rank until the last micro-batch, or each one divided at once: memory is the difference.
TEST(Fsdp, FSDP15_micro_batches_add_up_with_and_without_no_sync) {
  for (const bool whole_gradients : {true, false}) {
    FullyShardedDataParallel<MlpImpl> parallel(make_mlp(), group(), by_layer());
    FullyShardedOptimizer<torch::optim::SGD> optimizer(parallel, sgd);
    const auto reference = make_mlp();
    torch::optim::SGD reference_optimizer(reference->parameters(), sgd);
    for (int64_t step = 0; step < 3; ++step) {
      for (int64_t micro = 0; micro < 3; ++micro) {
        const auto scope = parallel.no_sync(whole_gradients && micro < 2);
        (mean_loss(parallel.forward(batch(group().rank(), 3 * step + micro))) / 3).backward();
      }
      optimizer.step();
      optimizer.zero_grad();
      for (int rank = 0; rank < group().size(); ++rank) {
        for (int64_t micro = 0; micro < 3; ++micro) {
          (mean_loss(reference->forward(batch(rank, 3 * step + micro))) / (3 * group().size())).backward();
        }
      }
      reference_optimizer.step();
      reference_optimizer.zero_grad();
      ASSERT_LT(difference(parallel.module()->parameters(), reference->parameters()), 1e-12)
          << whole_gradients << ", step " << step;
    }
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
  EXPECT_FALSE(parallel->first->weight.grad().defined());
  options.ignored_modules = {"fourth"};
  EXPECT_THROW(FullyShardedDataParallel<MlpImpl>(make_mlp(), group(), options), UsageError);
}

TEST(Fsdp, FSDP11_ranks_start_with_rank_0s_values) {
  auto model = seeded(group().rank() + 1);
  FullyShardedDataParallel<MlpImpl> parallel(model, group(), by_layer());
  EXPECT_TRUE(at::equal(parallel->first->weight, seeded(1)->first->weight));
}

TEST(Fsdp, FSDP16_the_norm_of_shards_is_the_norm_of_the_whole) {
  for (const double type : {1.0, 2.0, 3.0, static_cast<double>(INFINITY)}) {
    FullyShardedDataParallel<MlpImpl> parallel(make_mlp(), group(), by_layer());
    FullyShardedOptimizer<torch::optim::SGD> optimizer(parallel, SGDOptions(1));
    mean_loss(parallel.forward(batch(group().rank(), 0))).backward();
    const double norm = parallel.clip_grad_norm_(0.01, type);
    optimizer.step();
    auto reference = seeded(1);
    for (int rank = 0; rank < group().size(); ++rank) {
      (mean_loss(reference->forward(batch(rank, 0))) / group().size()).backward();
    }
    const double expected = torch::nn::utils::clip_grad_norm_(reference->parameters(), 0.01, type);
    EXPECT_NEAR(norm, expected, 1e-12 * expected) << type;
    torch::optim::SGD(reference->parameters(), SGDOptions(1)).step();
    EXPECT_LT(difference(parallel.module()->parameters(), reference->parameters()), 1e-12) << type;
  }
}

TEST(Fsdp, FSDP17_state_goes_to_other_strategies_and_back) {
  const auto train = [](auto& parallel, auto& optimizer, int64_t from, int64_t to) {
    for (int64_t step = from; step < to; ++step) {
      optimizer.zero_grad();
      mean_loss(parallel.forward(batch(group().rank(), step))).backward();
      optimizer.step();
    }
  };
  const auto options = AdamWOptions(1e-2);
  FullyShardedDataParallel<MlpImpl> whole_run(make_mlp(), group(), by_layer());
  FullyShardedOptimizer<torch::optim::AdamW> whole_optimizer(whole_run, options);
  train(whole_run, whole_optimizer, 0, 6);

  // Sharded, then replicated, then sharded again, in other units.
  FullyShardedDataParallel<MlpImpl> first(make_mlp(), group(), by_layer());
  FullyShardedOptimizer<torch::optim::AdamW> first_optimizer(first, options);
  train(first, first_optimizer, 0, 2);
  const auto adopt = [](MlpImpl& model, const std::map<std::string, at::Tensor>& state) {
    const torch::NoGradGuard no_grad;
    for (auto& entry : model.named_parameters()) entry.value().copy_(state.at(entry.key()));
  };
  auto plain = seeded(5);
  adopt(*plain, first.full_state_dict());
  DistributedDataParallel<MlpImpl> second(plain, group());
  torch::optim::AdamW second_optimizer(plain->parameters(), options);
  load_optimizer_state(second_optimizer, *plain, first_optimizer.state_dict());
  train(second, second_optimizer, 2, 4);

  auto again = seeded(6);
  adopt(*again, [&] {
    std::map<std::string, at::Tensor> state;
    for (const auto& entry : plain->named_parameters()) state[entry.key()] = entry.value().detach();
    return state;
  }());
  FullyShardedDataParallel<MlpImpl> third(again, group());
  FullyShardedOptimizer<torch::optim::AdamW> third_optimizer(third, options);
  third_optimizer.load_state_dict(optimizer_state(second_optimizer, *plain));
  train(third, third_optimizer, 4, 6);
  EXPECT_LT(difference(third.module()->parameters(), whole_run.module()->parameters()), 1e-12);
  EXPECT_EQ(first.full_state_dict(0).empty(), group().rank() != 0) << "on the recipient alone";
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

TEST(Fsdp, WrongOptionsAreRefused) {
  const auto make = [](const Options& options) { FullyShardedDataParallel<MlpImpl>(make_mlp(), group(), options); };
  EXPECT_THROW(make({.unit_limit = 1, .prefetch_units = 1}), UsageError);
  EXPECT_THROW(make({.shard_size = 2}), UsageError);
  EXPECT_THROW(make({.param_dtype = at::kLong}), UsageError);
  EXPECT_THROW(make({.sharding_strategy = ShardingStrategy::hybrid_shard, .shard_size = group().size() + 1}),
               UsageError);
  FullyShardedDataParallel<MlpImpl> parallel(make_mlp(), group());
  FullyShardedOptimizer<torch::optim::SGD> plain(parallel, sgd);
  EXPECT_THROW(FullyShardedOptimizer<torch::optim::LBFGS>(parallel, torch::optim::LBFGSOptions()), UsageError);
  auto integers = seeded(1);
  integers->register_parameter("count", at::ones({2}, at::kLong), /*requires_grad=*/false);
  EXPECT_THROW(FullyShardedDataParallel<MlpImpl>(integers, group()), UsageError);
}

}  // namespace
}  // namespace shoal
