// Checkpoints of trainings in which parameters are frozen, unfrozen or converted, as in fine-tuning.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adamw.h>

#include "checkpoint/saving/saver.h"
#include "engine/checkpoint/contents.h"
#include "engine/checkpoint/training_state.h"
#include "shoal/checkpoint.h"
#include "shoal/optim.h"
#include "shoal/training.h"
#include "tests/support/models.h"
#include "tests/support/refusal.h"
#include "tests/support/shared_folder.h"
#include "tests/support/world.h"

namespace shoal::test::checkpoint_frozen_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using Groups = OptimizerRecipe::ParamGroups;

void set_trainable(torch::nn::Module& layer, bool trainable) {
  for (auto& parameter : layer.parameters()) parameter.set_requires_grad(trainable);
}

// Two param groups: the first layer, and the others with half its rate.
OptimizerRecipe two_groups() {
  return optimizer_recipe<AdamW>(AdamWOptions(0.02), [](const torch::nn::Module& module) {
    std::vector<at::Tensor> first, others;
    for (const auto& entry : module.named_parameters()) {
      (entry.key().starts_with("first") ? first : others).push_back(entry.value());
    }
    Groups groups;
    groups.emplace_back(others, std::make_unique<AdamWOptions>(0.01));
    groups.emplace_back(first);
    return groups;
  });
}

OptimizerRecipe one_group() {
  return optimizer_recipe<AdamW>(AdamWOptions(0.02), [](const torch::nn::Module& module) {
    Groups groups;
    groups.emplace_back(module.parameters());
    return groups;
  });
}

struct Job {
  Job(const std::string& strategy, bool freeze, const OptimizerRecipe& recipe = one_group())
      : model(made(freeze)),
        training(make_training(strategy, model, recipe, group())),
        state(training->state().value()) {}
  static Mlp made(bool freeze) {
    auto model = seeded(5);
    set_trainable(*model->first, !freeze);
    return model;
  }
  void train(int64_t from, int64_t to) {
    for (int64_t step = from; step < to; ++step) {
      const auto dtype = model->third->weight.scalar_type();
      training->backward(mean_loss(training.forward(batch(group().rank(), step).to(dtype))));
      training->step();
      training->zero_grad();
    }
  }
  std::vector<at::Tensor> parameters() {
    const auto whole = training->full_parameters();
    return copies(*model);
  }
  double rate(size_t number) { return training->optimizer().param_groups()[number].options().get_lr(); }

  Mlp model;
  Training<MlpImpl> training;
  TrainingState state;
};

class Frozen : public testing::TestWithParam<std::string> {};

// The second stage of a fine-tuning.
TEST_P(Frozen, BEY05_what_was_frozen_at_the_save_may_be_trained_after_the_load_and_the_rest_keeps_its_state) {
  const SharedFolder folder;
  {
    Job first(GetParam(), /*freeze=*/true);
    first.train(0, 3);
    save(folder / "run", first.state, {.step = 3});
  }
  Job second(GetParam(), /*freeze=*/false);
  const auto loaded = load(folder / "run", second.state);
  EXPECT_EQ(loaded.step, 3);
  const bool averages = GetParam() == "local_sgd" || GetParam() == "diloco";
  if (GetParam() == "ddp" || averages) {  // whose optimizer had them all the time
    EXPECT_THAT(loaded.differences, IsEmpty());
  } else {
    EXPECT_THAT(loaded.differences, ElementsAre(testing::AllOf(HasSubstr("first.weight"), HasSubstr("first.bias"),
                                                               HasSubstr("not trained in the checkpoint"))));
  }
  EXPECT_EQ(loaded.exact, loaded.differences.empty());
  second.train(3, 5);
  const auto state = second.training->optimizer_state();
  EXPECT_EQ(state.at("third.weight").numbers.at("step"), 5);
  EXPECT_EQ(state.at("first.weight").numbers.at("step"), 2);
  if (averages || GetParam() == "decentralized") return;

  Job uninterrupted("ddp", /*freeze=*/true);
  uninterrupted.train(0, 3);
  save(folder / "ddp", uninterrupted.state, {.step = 3});
  Job expected("ddp", /*freeze=*/false);
  load(folder / "ddp", expected.state);
  expected.train(3, 5);
  EXPECT_LT(difference(second.parameters(), expected.parameters()), 1e-12);
}

TEST_P(Frozen, BEY05_param_groups_of_frozen_parameters_get_their_options_back) {
  if (GetParam() == "decentralized") GTEST_SKIP() << "its options are those of the optimizers of its buckets";
  const SharedFolder folder;
  Job saved(GetParam(), /*freeze=*/true, two_groups());
  saved.training->optimizer().param_groups()[0].options().set_lr(0.003);
  saved.training->optimizer().param_groups()[1].options().set_lr(0.005);
  saved.train(0, 2);
  save(folder / "run", saved.state, {.step = 2});
  Job resumed(GetParam(), /*freeze=*/true, two_groups());
  EXPECT_TRUE(load(folder / "run", resumed.state).exact);
  EXPECT_EQ(resumed.rate(0), 0.003);
  EXPECT_EQ(resumed.rate(1), 0.005);

  const auto replanned = saved.training.replan(GetParam());
  EXPECT_THAT(replanned.differences, IsEmpty());
  EXPECT_EQ(saved.rate(0), 0.003);
  EXPECT_EQ(saved.rate(1), 0.005);
}

INSTANTIATE_TEST_SUITE_P(All, Frozen,
                         testing::Values("ddp", "zero1", "zero2", "megatron", "fsdp", "local_sgd", "diloco",
                                         "decentralized"),
                         [](const auto& info) { return info.param; });

// Checkpoints in which such a group has no names, as shoal wrote them before.
TEST(FrozenGroups, BEY05_a_group_without_names_is_found_by_its_place) {
  const SharedFolder folder;
  Job saved("zero1", /*freeze=*/true, two_groups());
  saved.train(0, 1);
  auto contents = contents_of(*saved.state.state().source, group(), {}, {.step = 1});
  auto& groups = contents.global_state["param_groups"];
  EXPECT_EQ(groups[1]["parameters"], (nlohmann::json{"first.weight", "first.bias"}));
  groups[1]["parameters"] = nlohmann::json::array();
  groups[1]["options"]["lr"] = 0.125;
  CheckpointSaver(group(), folder / "run").save(contents);
  Job resumed("zero1", /*freeze=*/true, two_groups());
  load(folder / "run", resumed.state);
  EXPECT_EQ(resumed.rate(1), 0.125);
}

TEST(FrozenGroups, BEY05_another_optimizers_parameters_are_refused_with_what_to_do) {
  const SharedFolder folder;
  Job saved("fsdp", /*freeze=*/false);
  saved.train(0, 1);
  save(folder / "run", saved.state, {.step = 1});
  Job frozen("fsdp", /*freeze=*/true);
  EXPECT_THAT(refusal([&] { load(folder / "run", frozen.state); }),
              testing::AllOf(HasSubstr("not trained here: first.bias, first.weight"), HasSubstr("requires_grad"),
                             HasSubstr("model_only")));
}

class Thawing : public testing::TestWithParam<std::string> {};

// Gradual unfreezing: the program freezes, wraps, loads, and unfreezes in its loop.
TEST_P(Thawing, BEY05_a_load_before_and_after_unfreezing_ends_as_without_a_stop) {
  const SharedFolder folder;
  Job whole(GetParam(), /*freeze=*/true);
  whole.train(0, 3);
  set_trainable(*whole.model->first, true);
  save(folder / "thawed", whole.state, {.step = 3});
  whole.train(3, 6);
  save(folder / "later", whole.state, {.step = 6});
  whole.train(6, 8);
  for (const bool before : {false, true}) {
    for (const int64_t from : {3, 6}) {
      SCOPED_TRACE(testing::Message() << (before ? "unfrozen before" : "unfrozen after") << " the load, from " << from);
      Job resumed(GetParam(), /*freeze=*/true);
      if (before) set_trainable(*resumed.model->first, true);
      const auto loaded = load(folder / (from == 3 ? "thawed" : "later"), resumed.state);
      EXPECT_THAT(loaded.differences, IsEmpty());
      EXPECT_TRUE(loaded.exact);
      set_trainable(*resumed.model->first, true);
      resumed.train(from, 8);
      EXPECT_LT(difference(resumed.parameters(), whole.parameters()), 1e-12);
      EXPECT_EQ(resumed.training->optimizer_state().at("first.weight").numbers.at("step"), 5);
    }
  }
}

TEST_P(Thawing, BEY05_state_of_what_is_frozen_after_the_load_is_kept) {
  const SharedFolder folder;
  Job saved(GetParam(), /*freeze=*/false);
  saved.train(0, 3);
  save(folder / "run", saved.state, {.step = 3});
  Job frozen(GetParam(), /*freeze=*/true);
  EXPECT_TRUE(load(folder / "run", frozen.state).exact);
  const auto before = copies(*frozen.model);
  frozen.train(3, 5);
  EXPECT_TRUE(at::equal(frozen.model->first->weight, before[0]));
  EXPECT_FALSE(at::equal(frozen.model->third->weight, before[4]));
  EXPECT_EQ(frozen.training->optimizer_state().at("first.weight").numbers.at("step"), 3);
  set_trainable(*frozen.model->first, true);
  frozen.train(5, 6);
  EXPECT_EQ(frozen.training->optimizer_state().at("first.weight").numbers.at("step"), 4);
}

TEST_P(Thawing, BEY05_a_load_after_a_conversion_keeps_the_new_dtype) {
  const SharedFolder folder;
  Job job(GetParam(), /*freeze=*/false);
  job.train(0, 3);
  save(folder / "run", job.state, {.step = 3});
  const auto saved = copies(*job.model);
  job.model->to(at::kFloat);
  load(folder / "run", job.state);
  EXPECT_EQ(job.model->first->weight.scalar_type(), at::kFloat);
  EXPECT_TRUE(at::equal(job.model->first->weight, saved[0].to(at::kFloat)));
  job.train(3, 4);
  EXPECT_EQ(job.model->first->weight.scalar_type(), at::kFloat);
  EXPECT_FALSE(at::equal(job.model->first->weight, saved[0].to(at::kFloat)));
}

INSTANTIATE_TEST_SUITE_P(All, Thawing, testing::Values("ddp", "zero1", "zero2"),
                         [](const auto& info) { return info.param; });

struct WithEmptyImpl : torch::nn::Module {
  WithEmptyImpl() {
    layer = register_module("layer", torch::nn::Linear(12, 3));
    frozen = register_module("frozen", torch::nn::Linear(3, 3));
    none = register_parameter("none", at::empty({0, 3}));
    to(at::kDouble);
    set_trainable(*frozen, false);
  }
  at::Tensor forward(const at::Tensor& x) { return frozen(layer(x)) + none.sum(); }
  torch::nn::Linear layer{nullptr}, frozen{nullptr};
  at::Tensor none;
};
TORCH_MODULE(WithEmpty);

// libtorch's Adagrad makes its state in the constructor, and cannot do without.
TEST(LoadAdagrad, BEY05_parameters_that_were_never_updated_begin_with_fresh_state) {
  const SharedFolder folder;
  const auto recipe = optimizer_recipe<torch::optim::Adagrad>(
      torch::optim::AdagradOptions(0.1).initial_accumulator_value(0.5), [](const torch::nn::Module& module) {
        Groups groups;
        groups.emplace_back(module.parameters());
        return groups;
      });
  for (const std::string strategy : {"ddp", "zero1"}) {
    SCOPED_TRACE(strategy);
    const auto job = [&](const std::function<void(WithEmpty&, Training<WithEmptyImpl>&, TrainingState&)>& act) {
      torch::manual_seed(1);
      WithEmpty model;
      auto training = make_training(strategy, model, recipe, group());
      auto state = training->state().value();
      act(model, training, state);
    };
    const auto step = [&](Training<WithEmptyImpl>& training, int64_t number) {
      training->backward(mean_loss(training.forward(batch(group().rank(), number))));
      training->step();
      training->zero_grad();
    };
    job([&](WithEmpty&, auto& training, auto& state) {
      step(training, 0);
      save(folder / strategy, state, {.step = 1});
    });
    job([&](WithEmpty& model, auto& training, auto& state) {
      EXPECT_TRUE(load(folder / strategy, state).exact);
      step(training, 1);
      if (strategy != "ddp") return;
      const auto& optimizer = training->optimizer();
      const auto& sum = static_cast<const torch::optim::AdagradParamState&>(
                            *optimizer.state().at(model->frozen->weight.unsafeGetTensorImpl()))
                            .sum();
      EXPECT_TRUE(at::equal(sum, at::full({3, 3}, 0.5, at::kDouble)));
    });
  }
}

// 16-bit parameters with float32 copies: either part may come first.
TEST(LoadModelOnly, BEY05_the_model_alone_keeps_the_copies_that_the_optimizers_state_has_brought) {
  const SharedFolder folder;
  for (const std::string strategy : {"megatron", "fsdp"}) {
    SCOPED_TRACE(strategy);
    const auto job = [&](int seed) {
      auto model = seeded(seed);
      model->to(at::kBFloat16);
      return make_training(strategy, model, one_group(), group(), {.precision = Precision::bf16()});
    };
    auto saved = job(1);
    for (int64_t step = 0; step < 3; ++step) {
      saved->backward(mean_loss(saved.forward(batch(group().rank(), step).to(at::kBFloat16)).to(at::kFloat)));
      saved->step();
      saved->zero_grad();
    }
    const auto state = saved->optimizer_state();
    const auto file = folder / (strategy + ".pt");
    saved->save_module(file);
    auto loaded = job(2);
    dynamic_cast<ShardedOptimizerCore&>(loaded->optimizer()).load_state_dict(state);
    auto training = loaded->state().value();
    load(file, training, {.model_only = true});
    const auto now = loaded->optimizer_state();
    ASSERT_EQ(now.size(), 6U);
    for (const auto& [name, entry] : now) {
      EXPECT_TRUE(at::equal(entry.tensors.at("main_param"), state.at(name).tensors.at("main_param"))) << name;
    }
  }
}

struct ScaledImpl : torch::nn::Module {
  explicit ScaledImpl(double value) {
    weight = register_parameter("weight", at::full({3, 4}, value, at::kBFloat16));
    scale = register_parameter("scale", at::full({}, value, at::kBFloat16));
  }
  at::Tensor forward(const at::Tensor& x) { return x.matmul(weight.t()) * scale; }
  at::Tensor weight, scale;
};

// A scalar, and a file of a coarser dtype, whose values count as they are.
TEST(LoadModelOnly, BEY05_the_model_alone_has_the_files_values) {
  const SharedFolder folder;
  for (const auto dtype : {at::kBFloat16, at::kFloat8_e5m2}) {
    const auto file = folder / fmt::format("{}.safetensors", toString(dtype));
    if (group().rank() == 0) {
      ScaledImpl model(1.25);
      for (auto& parameter : model.parameters()) parameter.set_data(parameter.detach().to(dtype));
      save_module(file, model);
    }
    group().barrier().wait();
    for (const std::string strategy : {"ddp", "megatron", "fsdp"}) {
      SCOPED_TRACE(fmt::format("{} {}", strategy, toString(dtype)));
      auto model = std::make_shared<ScaledImpl>(1.3046875);  // rounds to 1.25 in 8 bits
      auto training = make_training(strategy, model, one_group(), group(), {.precision = Precision::bf16()});
      auto state = training->state().value();
      load(file, state, {.model_only = true});
      const auto scope = training->full_parameters();
      EXPECT_EQ(model->weight.min().item<double>(), 1.25);
      EXPECT_EQ(model->scale.item<double>(), 1.25);
    }
  }
}

}  // namespace
}  // namespace shoal::test::checkpoint_frozen_test
