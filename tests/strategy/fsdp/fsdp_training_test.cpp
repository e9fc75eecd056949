// Results of training under FullyShardedDataParallel: dtypes, micro-batches, norms, state.

#include <gmock/gmock.h>
#include <torch/nn/module.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include "elastic/access.h"
#include "shoal/ddp.h"
#include "shoal/error.h"
#include "tests/strategy/fsdp/fsdp_training.h"
#include "tests/support/refusal.h"
#include "tests/support/training.h"

namespace shoal::test::fsdp_training_test {
namespace {

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

// Three layers of 2.25 MiB.
struct WideImpl : torch::nn::Module {
  static constexpr int64_t width = 768;
  WideImpl() {
    for (int64_t i = 0; i < 3; ++i) {
      const auto options = torch::nn::LinearOptions(width, width).bias(false);
      layers.push_back(register_module(std::to_string(i), torch::nn::Linear(options)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = torch::tanh(layer(x));
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};

TEST(Fsdp, FSDP02_the_gradients_of_a_large_unit_are_reduced_in_parts_where_ranks_share_memory) {
  const auto make = [] {
    torch::manual_seed(3);
    return std::make_shared<WideImpl>();
  };
  auto log = std::make_shared<CallLog>();
  FullyShardedDataParallel<WideImpl> parallel(make(), group().recorded(log));
  FullyShardedOptimizer<torch::optim::SGD> optimizer(parallel, sgd);
  ASSERT_EQ(parallel.units().size(), 1U);
  DistributedDataParallel<WideImpl> ddp(make(), group());
  torch::optim::SGD plain(ddp.module()->parameters(), sgd);
  for (int64_t step = 0; step < 3; ++step) {
    torch::manual_seed(10 * step + group().rank());
    const auto x = at::randn({2, WideImpl::width});
    log->clear();
    parallel.forward(x).square().sum().backward();
    const bool in_parts = group().size() > 1 && group().transport() == "host";
    EXPECT_EQ(log->count(Op::reduce_scatter), in_parts ? 2 : 1);
    optimizer.step();
    optimizer.zero_grad();
    ddp.forward(x).square().sum().backward();
    plain.step();
    plain.zero_grad();
    for (size_t i = 0; i < 3; ++i) {
      const auto& sharded = parallel.module()->layers[i]->weight;
      const auto& whole = ddp.module()->layers[i]->weight;
      if (group().transport() == "host") {
        EXPECT_TRUE(at::equal(sharded, whole)) << "to the bit";
      } else {
        EXPECT_LT(difference({sharded}, {whole}), 1e-5);
      }
    }
  }
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
  // Steps too small for bfloat16 have accumulated.
  const auto after = parallel.full_state_dict();
  const auto moved = (after.at("third.bias") - start.at("third.bias")).abs().max().item<double>();
  EXPECT_GT(moved, 0);
  EXPECT_LT(moved, 1e-2);
  EXPECT_EQ(after.at("third.bias").scalar_type(), at::kFloat);
  EXPECT_TRUE(at::equal(parallel->third->bias, after.at("third.bias").to(at::kBFloat16)));
}

TEST(Fsdp, FSDP05_sums_in_float32_are_for_gradients_of_16_bits) {
  const auto make = [](std::shared_ptr<MlpImpl> model, bool fp32, const char* strategy = "fsdp") {
    return Training<MlpImpl>::make<torch::optim::SGD>(strategy, std::move(model), group(), SGDOptions(0.1),
                                                      {.precision = Precision::bf16_mixed(),  // leaves float64 alone
                                                       .fp32_gradients = fp32});
  };
  const auto mixed = seeded(3).ptr();
  mixed->third->to(at::kBFloat16);
  EXPECT_THAT(refusal([&] { make(mixed, true); }), testing::HasSubstr("parameters of 16 and of 64 bits"));
  make(mixed, false);
  for (const auto* strategy : {"fsdp", "fsdp_no_shard"}) {
    std::vector<std::vector<at::Tensor>> results;
    for (const bool fp32 : {false, true}) {
      auto training = make(seeded(3).ptr(), fp32, strategy);
      for (int64_t step = 0; step < 2; ++step) {
        training.zero_grad();
        mean_loss(training.forward(batch(group().rank(), step))).backward();
        training.step();
      }
      results.push_back(copies(*training.model));
    }
    EXPECT_LT(difference(results[0], results[1]), 1e-14) << strategy;
  }
}

TEST(Fsdp, FSDP05_frozen_parameters_keep_the_values_that_16_bits_cannot_hold) {
  const auto exact = at::full({16, 16}, 1.001F);
  const auto model = std::make_shared<MlpImpl>(12, 16, 5, at::kFloat);
  model->second->weight.set_requires_grad(false).copy_(exact);
  auto options = by_layer();
  options.param_dtype = at::kBFloat16;
  FullyShardedDataParallel<MlpImpl> parallel(model, group(), options);
  FullyShardedOptimizer<torch::optim::SGD> optimizer(parallel, SGDOptions(1e-2));
  const auto kept = [&] { return parallel.full_state_dict().at("second.weight"); };
  const auto step = [&] {
    mean_loss(parallel.forward(batch(group().rank(), 0).to(at::kFloat))).backward();
    optimizer.step();
    optimizer.zero_grad();
  };
  step();
  EXPECT_EQ(parallel->second->weight.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(at::equal(kept(), exact));
  {
    const auto whole = parallel.summon_full_params();
    parallel->second->weight[3][4].fill_(0.5);
  }
  auto written = exact.clone();
  written[3][4].fill_(0.5);
  EXPECT_TRUE(at::equal(kept(), written)) << "where nothing was written, values stay exact";
  parallel->second->weight.set_data(exact + 1e-4);
  step();
  EXPECT_TRUE(at::equal(kept(), exact + 1e-4)) << "as after a load";
  parallel->second->weight.fill_(3);
  step();
  EXPECT_TRUE(at::equal(kept(), at::full_like(exact, 3)));
  parallel->second->weight.set_data(exact.clone());
  parallel.unwrap();
  EXPECT_TRUE(at::equal(model->second->weight, exact));
}

TEST(Fsdp, FSDP05_frozen_parameters_that_have_the_dtype_already_get_no_copies) {
  const auto exact = at::full({16, 16}, 1.001F);
  const auto model = std::make_shared<MlpImpl>(12, 16, 5, at::kFloat);
  model->second->weight.set_requires_grad(false).copy_(exact);
  const auto& bias = model->second->bias.set_requires_grad(false);
  bias.set_data(at::full({16}, 0.5, at::kBFloat16));
  auto options = by_layer();
  options.param_dtype = at::kBFloat16;
  FullyShardedDataParallel<MlpImpl> parallel(model, group(), options);
  const auto state = parallel.full_state_dict();
  EXPECT_TRUE(at::equal(state.at("second.weight"), exact));
  EXPECT_TRUE(at::equal(state.at("second.bias"), at::full({16}, 0.5, at::kBFloat16)));
  EXPECT_EQ(state.at("second.bias").scalar_type(), at::kBFloat16);
  if (!parallel.shared()) return;
  EXPECT_EQ(ElasticAccess::frozen_copies(parallel).size(), 1) << "of the weight";
}

// Two buffers with the same short name and different dtypes.
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

// Gradients whole on every rank until the last micro-batch, or each reduce-scattered at once: only memory differs.
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

  // Sharded, then replicated, then sharded again with other units.
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

}  // namespace
}  // namespace shoal::test::fsdp_training_test
