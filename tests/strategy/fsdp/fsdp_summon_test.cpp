// summon_full_params: writes within it, and what it leaves unchanged.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include "shoal/error.h"
#include "tests/strategy/fsdp/fsdp_training.h"
#include "tests/support/refusal.h"

namespace shoal::test::fsdp_summon_test {
namespace {

struct ScaleImpl : torch::nn::Module {
  ScaleImpl() { scale = register_parameter("scale", at::ones({1}, at::kDouble)); }
  at::Tensor forward(const at::Tensor& x) { return x * scale; }
  at::Tensor scale;
};

TEST(Fsdp, FSDP18_ranks_that_own_nothing_take_part) {
  FullyShardedDataParallel<ScaleImpl> parallel(std::make_shared<ScaleImpl>(), group());
  const auto write = [&](bool writeback, double value) {
    const auto whole = parallel.summon_full_params(writeback);
    const torch::NoGradGuard no_grad;
    parallel->scale.fill_(value);
  };
  write(false, 5);
  EXPECT_EQ(parallel->scale.detach().clone().item<double>(), 1);
  write(true, 7);
  EXPECT_EQ(parallel->scale.detach().clone().item<double>(), 7);
}

TEST(Fsdp, FSDP18_what_ranks_change_in_place_changes_once) {
  const auto change = [](torch::nn::Module& model) {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : model.parameters()) {
      parameter.mul_(3).add_(1);
      *parameter.data_ptr<double>() += 2;
    }
  };
  for (const bool writeback : {false, true}) {
    auto model = seeded(1);
    model->second->weight.set_requires_grad(false);
    FullyShardedDataParallel<MlpImpl> parallel(model, group(), by_layer());
    auto changed = seeded(1);
    change(*changed);
    {
      const auto whole = parallel.summon_full_params(writeback);
      change(*model);
      EXPECT_EQ(difference(model->parameters(), changed->parameters()), 0) << "within the scope";
    }
    const auto expected = writeback ? changed : seeded(1);
    EXPECT_EQ(difference(model->parameters(), expected->parameters()), 0) << "writeback " << writeback;
  }
}

TEST(Fsdp, FSDP18_float32_copies_stay_exact_where_nothing_was_written) {
  auto model = seeded(1);
  model->to(at::kFloat);
  auto options = by_layer();
  options.param_dtype = at::kBFloat16;
  FullyShardedDataParallel<MlpImpl> parallel(model, group(), options);
  auto expected = parallel.full_state_dict();
  { const auto whole = parallel.summon_full_params(); }
  for (const auto& [name, value] : parallel.full_state_dict()) EXPECT_TRUE(at::equal(value, expected.at(name))) << name;
  {
    const auto whole = parallel.summon_full_params();
    const torch::NoGradGuard no_grad;
    parallel->second->weight[3][4].fill_(0.5);
  }
  expected.at("second.weight")[3][4].fill_(0.5);
  for (const auto& [name, value] : parallel.full_state_dict()) EXPECT_TRUE(at::equal(value, expected.at(name))) << name;
}

TEST(Fsdp, FSDP18_edits_of_frozen_parameters_are_lost_without_writeback_as_well) {
  auto model = seeded(1);
  model->second->weight.set_requires_grad(false);
  FullyShardedDataParallel<MlpImpl> parallel(model, group(), by_layer());
  const auto write = [&](bool writeback) {
    const auto whole = parallel.summon_full_params(writeback);
    const torch::NoGradGuard no_grad;
    parallel->second->weight.fill_(2);
    parallel->second->bias.fill_(3);
  };
  write(false);
  EXPECT_TRUE(at::equal(parallel->second->weight.clone(), seeded(1)->second->weight));
  EXPECT_TRUE(at::equal(parallel->second->bias.detach().clone(), seeded(1)->second->bias));
  write(true);
  EXPECT_EQ(parallel->second->weight.clone().mean().item<double>(), 2);
  EXPECT_EQ(parallel->second->bias.detach().clone().mean().item<double>(), 3);
}

TEST(Fsdp, FSDP18_meanwhile_other_scopes_forward_and_step_are_refused_and_training_goes_on) {
  FullyShardedDataParallel<MlpImpl> parallel(make_mlp(), group(), by_layer());
  FullyShardedOptimizer<torch::optim::SGD> optimizer(parallel, sgd);
  const auto input = batch(group().rank(), 0);
  mean_loss(parallel.forward(input)).backward();
  for (const bool writeback : {true, false}) {
    const auto whole = parallel.summon_full_params(writeback);
    EXPECT_THAT(refusal([&] { const auto again = parallel.summon_full_params(false); }),
                testing::HasSubstr("summon_full_params() within another one"));
    EXPECT_THAT(refusal([&] { parallel.forward(input); }), testing::HasSubstr("summon_full_params"));
    EXPECT_THAT(refusal([&] { optimizer.step(); }), testing::HasSubstr("summon_full_params"));
  }
  optimizer.step();
  auto reference = seeded(1);
  torch::optim::SGD reference_optimizer(reference->parameters(), sgd);
  for (int rank = 0; rank < group().size(); ++rank) {
    (mean_loss(reference->forward(batch(rank, 0))) / group().size()).backward();
  }
  reference_optimizer.step();
  EXPECT_LT(difference(parallel->parameters(), reference->parameters()), 1e-12);
}

TEST(Fsdp, FSDP18_options_that_contradict_each_other_or_differ_between_ranks_are_refused) {
  FullyShardedDataParallel<MlpImpl> parallel(make_mlp(), group(), by_layer());
  EXPECT_THAT(refusal([&] { const auto whole = parallel.summon_full_params({.rank0_only = true}); }),
              testing::HasSubstr("rank0_only with writeback"));
  if (group().size() > 1) {
    EXPECT_THAT(refusal<DisagreeError>(
                    [&] { const auto whole = parallel.summon_full_params({.writeback = group().rank() == 0}); }),
                testing::HasSubstr("writeback"));
  }
  const auto whole = parallel.summon_full_params({.offload_to_cpu = true});
  EXPECT_EQ(parallel->first->weight.data_ptr<double>()[0], seeded(1)->first->weight.data_ptr<double>()[0])
      << "a model on the CPU is there already";
}

TEST(Fsdp, FSDP18_rank0_only_gathers_on_rank_0_and_nothing_that_is_written_counts) {
  FullyShardedDataParallel<MlpImpl> parallel(make_mlp(), group(), by_layer());
  {
    const auto whole = parallel.summon_full_params({.writeback = false, .rank0_only = true});
    const auto read = [&] { return parallel->second->weight.data_ptr<double>()[0]; };
    if (group().rank() == 0) {
      EXPECT_EQ(read(), seeded(1)->second->weight.data_ptr<double>()[0]);
      const torch::NoGradGuard no_grad;
      parallel->first->bias.fill_(5);
    } else if (!parallel.shared()) {
      EXPECT_THROW(read(), c10::Error) << "it is not there";
    }
  }
  EXPECT_LT(difference(parallel->parameters(), seeded(1)->parameters()), 1e-15);
}

struct Nested {
  std::shared_ptr<MlpImpl> model = make_mlp();
  FullyShardedDataParallel<torch::nn::LinearImpl> inner{model->second.ptr(), group()};
  FullyShardedDataParallel<MlpImpl> outer{model, group(), {.auto_wrap_policy = wrap_names({"third"})}};
};

TEST(Fsdp, FSDP18_recurse_says_whether_units_and_wrappers_inside_are_held_as_well) {
  for (const bool recurse : {true, false}) {
    Nested nested;
    {
      const auto whole = nested.outer.summon_full_params({.recurse = recurse});
      const torch::NoGradGuard no_grad;
      nested.model->first->bias.data_ptr<double>();
      nested.model->first->bias.fill_(7);
      if (recurse) {
        nested.model->second->bias.data_ptr<double>();
        nested.model->second->bias.fill_(7);
        nested.model->third->bias.data_ptr<double>();
        nested.model->third->bias.fill_(7);
      } else if (!nested.outer.shared()) {
        EXPECT_THROW(nested.model->third->bias.data_ptr<double>(), c10::Error);
        EXPECT_THROW(nested.model->second->bias.data_ptr<double>(), c10::Error);
      }
    }
    EXPECT_EQ(nested.model->first->bias.detach().clone().mean().item<double>(), 7);
    for (const auto& layer : {nested.model->second, nested.model->third}) {
      EXPECT_EQ(layer->bias.detach().clone().mean().item<double>() == 7, recurse);
    }
  }
}

TEST(Fsdp, FSDP18_with_grads_shows_whole_sums_and_takes_what_is_written_to_them) {
  for (const bool writeback : {false, true}) {
    for (const bool rank0_only : {false, true}) {
      if (writeback && rank0_only) continue;
      SCOPED_TRACE(std::string(writeback ? "writeback" : "no writeback") + (rank0_only ? ", rank0_only" : ""));
      FullyShardedDataParallel<MlpImpl> parallel(make_mlp(), group(), by_layer());
      FullyShardedOptimizer<torch::optim::SGD> optimizer(parallel, SGDOptions(0.5));
      mean_loss(parallel.forward(batch(group().rank(), 0))).backward();
      auto reference = seeded(1);
      for (int rank = 0; rank < group().size(); ++rank) {
        (mean_loss(reference->forward(batch(rank, 0))) / group().size()).backward();
      }
      {
        const auto whole =
            parallel.summon_full_params({.writeback = writeback, .rank0_only = rank0_only, .with_grads = true});
        if (group().rank() == 0 || !rank0_only) {
          EXPECT_LT(difference(gradients(*parallel.module()), gradients(*reference)), 1e-12);
          const torch::NoGradGuard no_grad;
          for (auto& parameter : parallel->parameters()) parameter.mutable_grad().mul_(3);
        }
      }
      optimizer.step();
      if (writeback) {
        for (auto& parameter : reference->parameters()) parameter.mutable_grad().mul_(3);
      }
      torch::optim::SGD(reference->parameters(), SGDOptions(0.5)).step();
      EXPECT_LT(difference(parallel->parameters(), reference->parameters()), 1e-12);
    }
  }
}

}  // namespace
}  // namespace shoal::test::fsdp_summon_test
