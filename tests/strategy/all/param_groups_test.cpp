// Rows OSS01, SDP12, MEG01: every optimizer under every sharded class, with options per param group, equals one
// process. Later changes of groups are in param_groups_changed_test.cpp.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "shoal/ddp.h"
#include "shoal/fsdp.h"
#include "shoal/megatron.h"
#include "shoal/optim.h"
#include "shoal/zero.h"
#include "tests/support/models.h"
#include "tests/support/refusal.h"
#include "tests/support/world.h"

namespace shoal::test::param_groups_test {
namespace {

using torch::optim::OptimizerParamGroup;
using Groups = std::vector<OptimizerParamGroup>;

constexpr int64_t steps = 5;

// Changes rates as a scheduler does.
void change_rates(torch::optim::Optimizer& optimizer, int64_t step) {
  auto& groups = optimizer.param_groups();
  for (size_t number = 0; number < groups.size(); ++number) {
    auto& options = groups[number].options();
    options.set_lr(options.get_lr() * (number == 0 ? 0.7 : 1 + 0.1 * static_cast<double>(step)));
  }
}

template <class Forward>
void train(Mlp& model, torch::optim::Optimizer& optimizer, const Forward& forward) {
  for (int64_t step = 0; step < steps; ++step) {
    mean_loss(forward(batch(group().rank(), step))).backward();
    optimizer.step();
    optimizer.zero_grad();
    for (const auto& parameter : model->parameters()) parameter.mutable_grad().reset();
    change_rates(optimizer, step);
  }
}

// One optimizer, its defaults, and param groups of a prepared model.
template <class Local, class Options>
struct Trial {
  Options defaults;
  std::function<Mlp()> make;
  std::function<Groups(Mlp&)> groups;

  std::vector<at::Tensor> alone() const {
    auto model = make();
    Local optimizer(groups(model), defaults);
    for (int64_t step = 0; step < steps; ++step) {
      optimizer.zero_grad();
      for (int rank = 0; rank < group().size(); ++rank) {
        (mean_loss(model->forward(batch(rank, step))) / group().size()).backward();
      }
      optimizer.step();
      change_rates(optimizer, step);
    }
    return model->parameters();
  }

  // In float64; the order of sums may differ.
  void expect(const std::vector<at::Tensor>& values, const char* strategy) const {
    EXPECT_LT(difference(values, alone()), 1e-9) << strategy;
  }

  void expect_equal_everywhere() const {
    {
      auto model = make();
      OSS<Local> optimizer(groups(model), defaults, group());
      DistributedDataParallel<MlpImpl> parallel(model, group());
      train(model, optimizer, [&](const at::Tensor& x) { return parallel.forward(x); });
      expect(model->parameters(), "OSS under DistributedDataParallel");
    }
    {
      auto model = make();
      OSS<Local> optimizer(groups(model), defaults, group());
      ShardedDataParallel<MlpImpl> parallel(model, optimizer, group());
      train(model, optimizer, [&](const at::Tensor& x) { return parallel.forward(x); });
      expect(model->parameters(), "OSS under ShardedDataParallel");
    }
    {
      auto model = make();
      DistributedOptimizer<Local> optimizer({model.ptr()}, groups(model), defaults, group());
      for (int64_t step = 0; step < steps; ++step) {
        mean_loss(model->forward(batch(group().rank(), step))).backward();
        optimizer.step();
        optimizer.zero_grad();
        change_rates(optimizer, step);
      }
      expect(model->parameters(), "DistributedOptimizer");
    }
    {
      auto model = make();
      FullyShardedDataParallel<MlpImpl> parallel(model, group(), {.shard_by_parameter = !element_wise<Local>});
      FullyShardedOptimizer<Local> optimizer(parallel, groups(model), defaults);
      for (int64_t step = 0; step < steps; ++step) {
        mean_loss(parallel.forward(batch(group().rank(), step))).backward();
        optimizer.step();
        optimizer.zero_grad();
        change_rates(optimizer, step);
      }
      const auto all = parallel.full_state_dict();
      std::vector<at::Tensor> values;
      for (const auto& entry : model->named_parameters()) values.push_back(all.at(entry.key()));
      expect(values, "FullyShardedOptimizer");
    }
  }
};

// The first layer has its own options, the second one option that is set and others that are not, the third none.
template <class Local, class Options>
void try_groups(const Options& defaults, const Options& own, const Options& partly, bool matrices_only = false) {
  const auto make = [matrices_only] {
    auto model = seeded(1);
    for (auto& parameter : model->parameters()) parameter.set_requires_grad(!matrices_only || parameter.dim() == 2);
    return model;
  };
  const auto groups = [=](Mlp& model) {
    const auto of = [&](const torch::nn::Linear& layer) {
      return matrices_only ? std::vector<at::Tensor>{layer->weight} : layer->parameters();
    };
    Groups list;
    list.emplace_back(of(model->first), std::make_unique<Options>(own));
    list.emplace_back(of(model->second), std::make_unique<Options>(partly));
    list.emplace_back(of(model->third));
    return list;
  };
  Trial<Local, Options>{defaults, make, groups}.expect_equal_everywhere();
}

template <class Local, class Options>
void try_decay_groups(const Options& options) {
  const auto groups = [=](Mlp& model) { return decay_groups(*model, options).groups; };
  auto any = seeded(1);
  const auto defaults = decay_groups(*any, options).defaults;
  Trial<Local, Options>{defaults, [] { return seeded(1); }, groups}.expect_equal_everywhere();
}

TEST(ParamGroups, SDP12_OSS01_sgd_and_fused_sgd) {
  const auto defaults = torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01);
  const auto own = torch::optim::SGDOptions(0.2).momentum(0.5).weight_decay(0.3).nesterov(true);
  const auto partly = torch::optim::SGDOptions(0.05).weight_decay(0.2);
  try_groups<torch::optim::SGD>(defaults, own, partly);
  try_groups<FusedSGD>(defaults, own, partly);
  try_decay_groups<torch::optim::SGD>(own);
}

TEST(ParamGroups, SDP12_OSS01_adam_and_fused_adam) {
  const torch::optim::AdamOptions defaults = torch::optim::AdamOptions(5e-3).weight_decay(0.01).amsgrad(true);
  const torch::optim::AdamOptions own = torch::optim::AdamOptions(2e-2).betas({0.8, 0.9}).weight_decay(0.3);
  const torch::optim::AdamOptions partly = torch::optim::AdamOptions().weight_decay(0.2);
  try_groups<torch::optim::Adam>(defaults, own, partly);
  try_groups<FusedAdam>(defaults, own, partly);
  try_decay_groups<FusedAdam>(own);
}

TEST(ParamGroups, SDP12_OSS01_adam_w_and_fused_adam_w) {
  const torch::optim::AdamWOptions defaults = torch::optim::AdamWOptions(5e-3).weight_decay(0.1);
  const torch::optim::AdamWOptions own = torch::optim::AdamWOptions(2e-2).betas({0.8, 0.9}).weight_decay(0.3);
  const torch::optim::AdamWOptions partly = torch::optim::AdamWOptions().weight_decay(0.2);
  try_groups<torch::optim::AdamW>(defaults, own, partly);
  try_groups<FusedAdamW>(defaults, own, partly);
  try_decay_groups<torch::optim::AdamW>(own);
}

TEST(ParamGroups, SDP12_OSS01_rmsprop_adagrad_and_fused_adagrad) {
  const torch::optim::RMSpropOptions rms = torch::optim::RMSpropOptions(5e-3).momentum(0.9).weight_decay(0.01);
  const torch::optim::RMSpropOptions own_rms = torch::optim::RMSpropOptions(2e-2).alpha(0.9).weight_decay(0.3);
  const torch::optim::RMSpropOptions partly_rms = torch::optim::RMSpropOptions().weight_decay(0.2);
  try_groups<torch::optim::RMSprop>(rms, own_rms, partly_rms);
  const torch::optim::AdagradOptions defaults = torch::optim::AdagradOptions(5e-2).initial_accumulator_value(0.1);
  const torch::optim::AdagradOptions own = torch::optim::AdagradOptions(2e-2).lr_decay(0.1).weight_decay(0.3);
  const torch::optim::AdagradOptions partly = torch::optim::AdagradOptions().weight_decay(0.2);
  try_groups<torch::optim::Adagrad>(defaults, own, partly);
  try_groups<FusedAdagrad>(defaults, own, partly);
}

TEST(ParamGroups, SDP12_OSS01_lamb) {
  const LambOptions own = LambOptions(2e-2).betas({0.8, 0.9}).weight_decay(0.3).always_adapt(false);
  try_groups<Lamb>(LambOptions(5e-2), own, LambOptions().weight_decay(0));
  try_decay_groups<Lamb>(own);
}

TEST(ParamGroups, SDP12_OSS01_adafactor) {
  const AdafactorOptions own = AdafactorOptions(2e-2).weight_decay(0.3).eps1(1e-8).beta1(0.9);
  try_groups<Adafactor>(AdafactorOptions(5e-2), own, AdafactorOptions().weight_decay(0.2));
  try_decay_groups<Adafactor>(own);
}

TEST(ParamGroups, SDP12_OSS01_muon) {
  const MuonOptions own = MuonOptions(2e-2).weight_decay(0.3).nesterov(false).adjust_lr(MuonRate::match_rms_adamw);
  try_groups<Muon>(MuonOptions(5e-2), own, MuonOptions().weight_decay(0), /*matrices_only=*/true);
}

TEST(ParamGroups, BEY12_muon_for_matrices_and_adam_w_for_the_rest) {
  const MuonWithAdamWOptions defaults{.muon = MuonOptions(2e-2), .betas = {0.8, 0.9}, .eps = 1e-6};
  const auto rest = MuonOptions(5e-3).weight_decay(0.3);
  const auto groups = [=](Mlp& model) {
    auto list = MuonWithAdamW::groups_of(*model);
    list.back().set_options(std::make_unique<MuonOptions>(rest));
    return list;
  };
  const Trial<MuonWithAdamW, MuonWithAdamWOptions> trial{defaults, [] { return seeded(1); }, groups};
  trial.expect_equal_everywhere();

  auto model = seeded(1);
  const auto split = MuonWithAdamW::groups_of(*model);
  ASSERT_EQ(split.front().params().size(), 3);
  ASSERT_EQ(split.back().params().size(), 3);
  Muon muon(split.front().params(), defaults.muon);
  torch::optim::AdamW adam_w(
      split.back().params(),
      torch::optim::AdamWOptions(rest.lr()).betas(defaults.betas).eps(defaults.eps).weight_decay(rest.weight_decay()));
  for (int64_t step = 0; step < steps; ++step) {
    model->zero_grad();
    for (int rank = 0; rank < group().size(); ++rank) {
      (mean_loss(model->forward(batch(rank, step))) / group().size()).backward();
    }
    muon.step();
    adam_w.step();
    auto &rate = muon.param_groups()[0].options(), &other = adam_w.param_groups()[0].options();
    rate.set_lr(rate.get_lr() * 0.7);
    other.set_lr(other.get_lr() * (1 + 0.1 * static_cast<double>(step)));
  }
  EXPECT_LT(difference(model->parameters(), trial.alone()), 1e-9);
}

TEST(ParamGroups, BEY12_a_second_optimizer_over_sharded_parameters_is_refused_with_the_way) {
  auto model = seeded(1);
  FullyShardedDataParallel<MlpImpl> parallel(model, group(), {.shard_by_parameter = true});
  Groups matrices;
  matrices.push_back(MuonWithAdamW::groups_of(*model).front());
  EXPECT_THAT(refusal([&] { FullyShardedOptimizer<Muon>(parallel, matrices, MuonOptions()); }),
              testing::AllOf(testing::HasSubstr("parameter first.bias belongs to no param group"),
                             testing::HasSubstr("MuonWithAdamW is Muon for matrices and AdamW for the rest")));
}

TEST(ParamGroups, SDP12_OSS01_accum_adam_and_accum_adam_w) {
  const AccumAdamOptions own = AccumAdamOptions(2e-2).accum_iter(2).weight_decay(0.3);
  const AccumAdamOptions partly = AccumAdamOptions().weight_decay(0.2);
  try_groups<AccumAdam>(AccumAdamOptions(5e-2), own, partly);
  try_groups<AccumAdamW>(AccumAdamOptions(5e-2), own, partly);
  try_decay_groups<AccumAdamW>(own);
}

}  // namespace
}  // namespace shoal::test::param_groups_test
