// Sharded optimizers as torch::optim::Optimizer: effects of libtorch's own functions, few of which are virtual.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/lbfgs.h>
#include <torch/serialize.h>

#include <sstream>

#include "shoal/ddp.h"
#include "shoal/fsdp.h"
#include "shoal/local_updates.h"
#include "shoal/megatron.h"
#include "shoal/optim.h"
#include "shoal/optimizer_in_backward.h"
#include "shoal/shard_gossip.h"
#include "tests/strategy/all/mean_gradients.h"
#include "tests/support/refusal.h"

namespace shoal::test::param_groups_changed_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGDOptions;
using Groups = std::vector<OptimizerParamGroup>;

const auto sgd = SGDOptions(0.1).momentum(0.9);

at::Tensor fresh_parameter() {
  return at::full({3, 4}, 0.5, at::kDouble).requires_grad_(true);
}

// Sharded optimizer, and the model that it trains.
struct Sharded {
  Mlp model = seeded(1);
  std::shared_ptr<void> wrapper;
  std::shared_ptr<torch::optim::Optimizer> optimizer;
  std::function<void(const OptimizerParamGroup&)> add_param_group;
  std::function<std::vector<at::Tensor>()> parameters = [this] { return model->parameters(); };

  void step(int64_t number) {
    mean_loss(model->forward(batch(group().rank(), number))).backward();
    optimizer->step();
  }
};

template <class Optimizer>
void take(Sharded& sharded, std::shared_ptr<Optimizer> optimizer) {
  sharded.add_param_group = [raw = optimizer.get()](const OptimizerParamGroup& group) { raw->add_param_group(group); };
  sharded.optimizer = std::move(optimizer);
}

std::unique_ptr<Sharded> make(const std::string& name) {
  auto made = std::make_unique<Sharded>();
  auto& model = made->model;
  if (name == "OSS") {
    take(*made, std::make_shared<OSS<torch::optim::SGD>>(model->parameters(), sgd, group()));
    made->wrapper = std::make_shared<DistributedDataParallel<MlpImpl>>(model, group());
  } else if (name == "DistributedOptimizer") {
    take(*made, std::make_shared<DistributedOptimizer<torch::optim::SGD>>(model, sgd, group()));
  } else {
    const bool gossip = name == "ShardGossipOptimizer";
    const auto hosts = host_groups(group(), group().size());
    auto wrapper = std::make_shared<FullyShardedDataParallel<MlpImpl>>(model, gossip ? hosts.inside : group());
    if (gossip) {
      take(*made, std::make_shared<ShardGossipOptimizer<torch::optim::SGD>>(*wrapper, sgd, hosts.across));
    } else {
      take(*made, std::make_shared<FullyShardedOptimizer<torch::optim::SGD>>(*wrapper, sgd));
    }
    made->wrapper = wrapper;
    made->parameters = [raw = wrapper.get(), model] {
      const auto all = raw->full_state_dict();
      std::vector<at::Tensor> list;
      for (const auto& entry : model->named_parameters()) list.push_back(all.at(entry.key()));
      return list;
    };
  }
  return made;
}

std::vector<at::Tensor> alone(int64_t steps) {
  auto model = seeded(1);
  torch::optim::SGD optimizer(model->parameters(), sgd);
  for (int64_t step = 0; step < steps; ++step) {
    set_mean_gradients(model, step);
    optimizer.step();
  }
  return model->parameters();
}

class AsOptimizer : public testing::TestWithParam<std::string> {
 protected:
  // Takes a step, which must succeed and be correct: refused calls have changed nothing.
  void expect_goes_on(Sharded& sharded) {
    auto* core = dynamic_cast<ShardedOptimizerCore*>(sharded.optimizer.get());
    core != nullptr ? core->zero_grad() : sharded.optimizer->zero_grad();
    sharded.step(1);
    EXPECT_LT(difference(sharded.parameters(), alone(2)), 1e-12);
  }
};

TEST_P(AsOptimizer, torch_save_and_load_are_refused) {
  const auto sharded = make(GetParam());
  sharded->step(0);
  auto& optimizer = *sharded->optimizer;
  const auto names_the_call = AllOf(HasSubstr("shoal::save"), HasSubstr("state_dict()"));
  std::stringstream file;
  EXPECT_THAT(refusal([&] { torch::save(optimizer, file); }), names_the_call);
  torch::serialize::OutputArchive written;
  EXPECT_THAT(refusal([&] { optimizer.save(written); }), names_the_call);
  torch::optim::SGD other(std::vector<at::Tensor>{at::ones({2})}, sgd);
  std::stringstream others;
  torch::save(other, others);
  EXPECT_THAT(refusal([&] { torch::load(optimizer, others); }), names_the_call);
  expect_goes_on(*sharded);
}

TEST_P(AsOptimizer, what_comes_through_the_base_class_is_refused_by_the_next_step) {
  const auto sharded = make(GetParam());
  sharded->step(0);
  auto& base = *sharded->optimizer;
  const auto expect_refused = [&](const std::string& what) {
    EXPECT_THAT(
        refusal([&] { base.step(); }),
        AllOf(HasSubstr(what), HasSubstr(GetParam() == "OSS" ? "add_param_group" : "construct a new optimizer")));
  };
  base.add_param_group(OptimizerParamGroup({fresh_parameter()}));
  expect_refused("param group 1 with a parameter [3, 4] was added");
  base.param_groups().pop_back();
  base.param_groups()[0].params().push_back(fresh_parameter());
  expect_refused("a parameter [3, 4] was added to param group 0");
  base.param_groups()[0].params().pop_back();
  const auto last = base.param_groups()[0].params().back();
  base.parameters().pop_back();
  expect_refused("a parameter [5] was taken from param group 0");
  base.param_groups()[0].params().push_back(last);
  expect_goes_on(*sharded);
}

TEST_P(AsOptimizer, a_parameter_that_is_there_already_is_refused_at_once) {
  const auto sharded = make(GetParam());
  sharded->step(0);
  EXPECT_THAT(refusal([&] { sharded->add_param_group(OptimizerParamGroup({sharded->model->second->weight})); }),
              AllOf(HasSubstr(GetParam() == "OSS" ? "param groups 0 and 1" : "second.weight"),
                    HasSubstr(GetParam() == "ShardGossipOptimizer" ? "" : GetParam())));
  if (GetParam() != "OSS") {
    EXPECT_THAT(refusal([&] { sharded->add_param_group(OptimizerParamGroup({fresh_parameter()})); }),
                HasSubstr("a parameter [3, 4] is not one of the sharded parameters"));
  }
  EXPECT_EQ(sharded->optimizer->param_groups().size(), 1U);
  expect_goes_on(*sharded);
}

TEST_P(AsOptimizer, state_that_is_written_to_the_base_class_is_refused) {
  const auto sharded = make(GetParam());
  sharded->step(0);
  auto& base = *sharded->optimizer;
  base.state()[sharded->model->first->weight.unsafeGetTensorImpl()] = std::make_unique<torch::optim::SGDParamState>();
  EXPECT_THAT(refusal([&] { base.step(); }), AllOf(HasSubstr("state was written"), HasSubstr("load_state_dict()")));
  base.state().clear();
  expect_goes_on(*sharded);
}

INSTANTIATE_TEST_SUITE_P(All, AsOptimizer,
                         testing::Values("OSS", "DistributedOptimizer", "FullyShardedOptimizer",
                                         "ShardGossipOptimizer"),
                         [](const auto& info) { return info.param; });

TEST(ParamGroups, a_trainable_parameter_of_no_sharded_module_is_refused) {
  const auto groups = [](Mlp& model) {
    Groups list;
    list.emplace_back(model->parameters());
    list.emplace_back(std::vector<at::Tensor>{fresh_parameter()});
    return list;
  };
  auto model = seeded(1);
  EXPECT_THAT(refusal([&] { DistributedOptimizer<torch::optim::SGD>({model.ptr()}, groups(model), sgd, group()); }),
              HasSubstr("a parameter [3, 4] of param group 1"));
  FullyShardedDataParallel<MlpImpl> parallel(seeded(1), group(), {.ignored_parameters = {"third.bias"}});
  Groups all;
  all.emplace_back(parallel.module()->parameters());
  EXPECT_THAT(refusal([&] { FullyShardedOptimizer<torch::optim::SGD>(parallel, all, sgd); }),
              HasSubstr("a parameter [5] of param group 0"));
}

// libtorch's parameters() lists its parameters twice, and its optimizers update them twice.
struct TwoNamesImpl : torch::nn::Module {
  TwoNamesImpl() {
    first = register_module("first", torch::nn::Linear(4, 4));
    register_module("again", first);
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) { return first(first(x).tanh()); }
  torch::nn::Linear first{nullptr};
};

TEST(ParamGroups, a_submodule_under_two_names_is_updated_once) {
  const auto make_model = [] {
    torch::manual_seed(1);
    return std::make_shared<TwoNamesImpl>();
  };
  const auto x = at::ones({2, 4}, at::kDouble);  // the same on all ranks, and so are the mean gradients
  const auto train = [&](torch::optim::Optimizer& optimizer, const auto& forward) {
    for (int step = 0; step < 3; ++step) {
      forward(x).sum().backward();
      optimizer.step();
      optimizer.zero_grad();
    }
  };
  auto alone = make_model();
  ASSERT_EQ(alone->parameters().size(), 4U);
  torch::optim::SGD once(alone->first->parameters(), sgd);
  train(once, [&](const at::Tensor& input) { return alone->forward(input); });
  const auto expected = alone->first->weight;
  {
    auto model = make_model();
    OSS<torch::optim::SGD> optimizer(model->parameters(), sgd, group());
    DistributedDataParallel<TwoNamesImpl> parallel(model, group());
    train(optimizer, [&](const at::Tensor& input) { return parallel.forward(input); });
    EXPECT_LT((model->first->weight - expected).abs().max().item<double>(), 1e-12);
  }
  {
    auto model = make_model();
    DistributedOptimizer<torch::optim::SGD> optimizer({model}, sgd, group());
    train(optimizer, [&](const at::Tensor& input) { return model->forward(input); });
    EXPECT_LT((model->first->weight - expected).abs().max().item<double>(), 1e-12);
  }
  {
    FullyShardedDataParallel<TwoNamesImpl> parallel(make_model(), group());
    FullyShardedOptimizer<torch::optim::SGD> optimizer(parallel, sgd);
    train(optimizer, [&](const at::Tensor& input) { return parallel.forward(input); });
    EXPECT_LT((parallel.full_state_dict().at("first.weight") - expected).abs().max().item<double>(), 1e-12);
  }
}

// As docs/guides/ddp.md has it: by losses of their own, ranks would search along lines of their own.
TEST(ParamGroups, DDP01_lbfgs_with_the_mean_loss_goes_as_in_one_process) {
  auto model = seeded(1), one = seeded(1);
  DistributedDataParallel<MlpImpl> parallel(model, group());
  const auto options = torch::optim::LBFGSOptions(0.5).max_iter(5).line_search_fn("strong_wolfe");
  torch::optim::LBFGS optimizer(model->parameters(), options), reference(one->parameters(), options);
  for (int64_t step = 0; step < 2; ++step) {
    optimizer.step([&] {
      optimizer.zero_grad();
      const auto loss = mean_loss(parallel.forward(batch(group().rank(), step)));
      loss.backward();
      return at::scalar_tensor(group().all_reduce(loss.item<double>(), ReduceOp::avg), at::kDouble);
    });
    reference.step([&] {
      reference.zero_grad();
      auto loss = at::zeros({}, at::kDouble);
      for (int rank = 0; rank < group().size(); ++rank) {
        loss = loss + mean_loss(one->forward(batch(rank, step))) / group().size();
      }
      loss.backward();
      return loss;
    });
    EXPECT_LT(difference(model->parameters(), one->parameters()), 1e-8) << "step " << step;
  }
}

TEST(ParamGroups, lbfgs_and_options_of_another_type_are_refused) {
  const torch::optim::LBFGSOptions lbfgs(0.1);
  auto model = seeded(1);
  EXPECT_THAT(refusal([&] { OSS<torch::optim::LBFGS>(model->parameters(), lbfgs, group()); }),
              AllOf(HasSubstr("L-BFGS"), HasSubstr("the mean of the loss over ranks")));
  EXPECT_THAT(refusal([&] { DistributedOptimizer<torch::optim::LBFGS>(model, lbfgs, group()); }), HasSubstr("L-BFGS"));
  FullyShardedDataParallel<MlpImpl> parallel(seeded(1), group(), {.shard_by_parameter = true});
  EXPECT_THAT(refusal([&] { FullyShardedOptimizer<torch::optim::LBFGS>(parallel, lbfgs); }), HasSubstr("L-BFGS"));
  DistributedDataParallel<MlpImpl> replicated(seeded(1), group());
  torch::optim::LBFGS plain(replicated.module()->parameters(), lbfgs);
  EXPECT_THAT(refusal([&] { OptimizerInBackward(replicated, plain); }), HasSubstr("L-BFGS"));

  Groups mixed;
  mixed.emplace_back(seeded(1)->parameters(), std::make_unique<torch::optim::AdamOptions>(0.1));
  EXPECT_THAT(refusal([&] { OSS<torch::optim::SGD>(mixed, sgd, group()); }),
              AllOf(HasSubstr("AdamOptions"), HasSubstr("SGDOptions")));
  EXPECT_THROW(Lamb(mixed, LambOptions(0.1)), UsageError);
}

// After a refusal on any rank, the optimizer is unchanged on every rank.
TEST(ParamGroups, OSS06_a_group_that_is_refused_changes_nothing) {
  auto model = seeded(1);
  OSS<torch::optim::SGD> optimizer(model->parameters(), sgd, group());
  const auto train_equal = [&](int64_t step) {
    set_mean_gradients(model, step);
    optimizer.step();
    EXPECT_EQ(difference(model->parameters(), alone(step + 1)), 0);
  };
  train_equal(0);
  const auto with = [](std::vector<at::Tensor> parameters, double rate) {
    return OptimizerParamGroup(std::move(parameters), std::make_unique<SGDOptions>(rate));
  };
  EXPECT_THAT(refusal([&] {
                optimizer.add_param_group(with({fresh_parameter(), model->first->bias}, 0.1));
              }),
              HasSubstr("param groups 0 and 1"));
  train_equal(1);
  EXPECT_THAT(refusal([&] { optimizer.add_param_group(OptimizerParamGroup({fresh_parameter() * 2})); }),
              HasSubstr("not a leaf"));
  if (group().size() > 1) {
    EXPECT_THAT(refusal<DisagreeError>(
                    [&] { optimizer.add_param_group(with({fresh_parameter()}, 0.1 * (1 + group().rank()))); }),
                HasSubstr("lr 0.2"));
    const auto here = group().rank() == 0 ? fresh_parameter() : model->first->bias;
    EXPECT_THAT(refusal([&] { optimizer.add_param_group(with({here}, 0.1)); }), HasSubstr("rank 1"));
  }
  train_equal(2);
  EXPECT_EQ(optimizer.param_groups().size(), 1U);
  optimizer.add_param_group(with({fresh_parameter()}, 0.1));
  train_equal(3);
  optimizer.refresh_trainable();
  train_equal(4);
}

// The local optimizer of one rank refuses; all ranks get an error.
TEST(ParamGroups, OSS06_what_one_ranks_optimizer_refuses_is_refused_on_all) {
  auto model = seeded(1);
  const std::vector<at::Tensor> matrices{model->first->weight, model->second->weight};
  OSS<Muon> optimizer(matrices, MuonOptions(0.1), group());
  EXPECT_THAT(refusal([&] { optimizer.add_param_group(OptimizerParamGroup({model->first->bias})); }),
              HasSubstr("Muon"));
  EXPECT_THAT(refusal([&] { OSS<Muon>(model->parameters(), MuonOptions(0.1), group()); }), HasSubstr("Muon"));
  EXPECT_THAT(refusal([&] { DistributedOptimizer<Muon>(seeded(1), MuonOptions(0.1), group()); }), HasSubstr("Muon"));
  for (const auto& matrix : matrices) matrix.mutable_grad() = at::ones_like(matrix);
  optimizer.step();
}

TEST(ParamGroups, OSS06_an_added_group_keeps_its_own_options) {
  auto model = seeded(1), reference = seeded(1);
  const LambOptions defaults = LambOptions(0.05);
  const auto rest = [](Mlp& of) {
    auto list = of->second->parameters();
    for (const auto& parameter : of->third->parameters()) list.push_back(parameter);
    return OptimizerParamGroup(list, std::make_unique<LambOptions>(LambOptions(0.01).weight_decay(0.3)));
  };
  OSS<Lamb> sharded(model->first->parameters(), defaults, group());
  Lamb whole(reference->first->parameters(), defaults);
  for (int64_t step = 0; step < 4; ++step) {
    if (step == 2) {
      sharded.param_groups()[0].options().set_lr(0.02);
      whole.param_groups()[0].options().set_lr(0.02);
      sharded.add_param_group(rest(model));
      whole.add_param_group(rest(reference));
    }
    set_mean_gradients(model, step);
    set_mean_gradients(reference, step);
    sharded.step();
    whole.step();
  }
  EXPECT_EQ(difference(model->parameters(), reference->parameters()), 0);
  EXPECT_EQ(sharded.param_groups()[1].options().get_lr(), 0.01);
}

// The caller's own optimizer, whose parameters are averaged or exchanged one by one.
TEST(ParamGroups, groups_that_come_later_to_the_callers_optimizer_are_refused) {
  DistributedDataParallel<MlpImpl> parallel(seeded(1), group());
  torch::optim::SGD optimizer(parallel.module()->parameters(), sgd);
  const OptimizerInBackward in_backward(parallel, optimizer);
  mean_loss(parallel.forward(batch(group().rank(), 0))).backward();
  EXPECT_LT(difference(parallel.module()->parameters(), alone(1)), 1e-12);
  optimizer.add_param_group(OptimizerParamGroup({fresh_parameter()}));
  EXPECT_THAT(refusal([&] { mean_loss(parallel.forward(batch(group().rank(), 1))).backward(); }),
              HasSubstr("param group 1 with a parameter [3, 4]"));

  auto model = seeded(1);
  torch::optim::SGD inner(model->parameters(), sgd);
  LocalUpdates local(model, inner, group(), {.every = 2});
  inner.parameters().push_back(fresh_parameter());
  EXPECT_THAT(refusal([&] { local.step(); }), HasSubstr("a parameter [3, 4] was added to param group 0"));
}

}  // namespace
}  // namespace shoal::test::param_groups_changed_test
