// Checkpoints of whole trainings: options of param groups, schedules; modules without a training.

#include <gmock/gmock.h>
#include <torch/optim/adam.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>

#include <numbers>

#include "checkpoint/saving/saver.h"
#include "engine/checkpoint/contents.h"
#include "shoal/error.h"
#include "shoal/megatron.h"
#include "shoal/optim.h"
#include "shoal/zero.h"
#include "tests/strategy/checkpoint/checkpoint_training.h"
#include "tests/support/models.h"
#include "tests/support/refusal.h"

namespace shoal::test::checkpoint_options_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGD;
using torch::optim::SGDOptions;
using Groups = std::vector<OptimizerParamGroup>;

// Model with one optimizer under a strategy, and its training step.
struct Trained {
  Mlp model{nullptr};
  std::shared_ptr<void> wrapper, optimizer;
  torch::optim::Optimizer* whole = nullptr;  // the optimizer that schedulers and users see
  std::unique_ptr<TrainingState> state;
  std::function<void(int64_t step)> step;
  std::function<std::vector<at::Tensor>()> parameters;

  ~Trained() {
    step = nullptr;
    state.reset();
    wrapper.reset();
    optimizer.reset();
  }
};

template <class Forward, class Optimizer>
void step_by(Trained& trained, const Forward& forward, Optimizer* optimizer) {
  trained.step = [forward, optimizer](int64_t step) {
    mean_loss(forward(batch(group().rank(), step))).backward();
    optimizer->step();
    optimizer->zero_grad();
  };
}

template <class Local, class Options>
std::unique_ptr<Trained> start(const std::string& strategy, const Options& defaults,
                               const std::function<Groups(Mlp&)>& groups) {
  auto trained = std::make_unique<Trained>();
  auto model = trained->model = seeded(1);
  trained->parameters = [model] { return model->parameters(); };
  if (strategy == "ddp") {
    auto optimizer = std::make_shared<Local>(groups(model), defaults);
    auto parallel = std::make_shared<DistributedDataParallel<MlpImpl>>(model, group());
    trained->whole = optimizer.get();
    trained->state = std::make_unique<TrainingState>(*parallel, *optimizer);
    step_by(
        *trained, [raw = parallel.get()](const at::Tensor& x) { return raw->forward(x); }, optimizer.get());
    trained->wrapper = parallel, trained->optimizer = optimizer;
  } else if (strategy == "zero1") {
    auto optimizer = std::make_shared<OSS<Local>>(groups(model), defaults, group());
    auto parallel = std::make_shared<DistributedDataParallel<MlpImpl>>(model, group());
    trained->whole = optimizer.get();
    trained->state = std::make_unique<TrainingState>(*parallel, *optimizer);
    step_by(
        *trained, [raw = parallel.get()](const at::Tensor& x) { return raw->forward(x); }, optimizer.get());
    trained->wrapper = parallel, trained->optimizer = optimizer;
  } else if (strategy == "megatron") {
    auto optimizer = std::make_shared<DistributedOptimizer<Local>>(DistributedOptimizerCore::Modules{model.ptr()},
                                                                   groups(model), defaults, group());
    trained->whole = optimizer.get();
    trained->state = std::make_unique<TrainingState>(*optimizer);
    step_by(
        *trained, [raw = model.ptr()](const at::Tensor& x) { return raw->forward(x); }, optimizer.get());
    trained->optimizer = optimizer;
  } else if (strategy == "local_updates") {
    auto optimizer = std::make_shared<Local>(groups(model), defaults);
    auto local = std::make_shared<LocalUpdates>(model, *optimizer, group(), LocalUpdatesOptions{.every = 2});
    trained->whole = optimizer.get();
    trained->state = std::make_unique<TrainingState>(*local);
    step_by(
        *trained, [raw = model.ptr()](const at::Tensor& x) { return raw->forward(x); }, local.get());
    trained->wrapper = local, trained->optimizer = optimizer;
  } else {
    auto parallel = std::make_shared<FullyShardedDataParallel<MlpImpl>>(
        model, group(), FullyShardedDataParallelOptions{.shard_by_parameter = !element_wise<Local>});
    auto optimizer = std::make_shared<FullyShardedOptimizer<Local>>(*parallel, groups(model), defaults);
    trained->whole = optimizer.get();
    trained->state = std::make_unique<TrainingState>(*parallel, *optimizer);
    step_by(
        *trained, [raw = parallel.get()](const at::Tensor& x) { return raw->forward(x); }, optimizer.get());
    trained->parameters = [raw = parallel.get(), model] {
      const auto all = raw->full_state_dict();
      std::vector<at::Tensor> list;
      for (const auto& entry : model->named_parameters()) list.push_back(all.at(entry.key()));
      return list;
    };
    trained->wrapper = parallel, trained->optimizer = optimizer;
  }
  return trained;
}

// Weights with the defaults, biases with their own options.
template <class Options>
std::function<Groups(Mlp&)> two_groups(const Options& of_biases) {
  return [=](Mlp& model) {
    std::vector<at::Tensor> weights, biases;
    for (const auto& parameter : model->parameters()) (parameter.dim() > 1 ? weights : biases).push_back(parameter);
    Groups groups;
    groups.emplace_back(weights);
    groups.emplace_back(biases, std::make_unique<Options>(of_biases));
    return groups;
  };
}

const SGDOptions fast = SGDOptions(0.1).momentum(0.9).weight_decay(0.2).nesterov(true);
const SGDOptions of_biases = SGDOptions(0.3).momentum(0.5).dampening(0.1);

class ParamGroupOptions : public testing::TestWithParam<std::string> {};

TEST_P(ParamGroupOptions, BEY05_every_option_comes_back_and_training_goes_on) {
  const SharedFolder folder;
  const auto try_optimizer = [&]<class Local>(std::type_identity<Local>, const auto& defaults, const auto& own,
                                              const auto& others) {
    using Chosen = std::decay_t<decltype(defaults)>;
    const auto running = start<Local>(GetParam(), Chosen(defaults), two_groups<Chosen>(own));
    const auto run = folder / typeid(Local).name();
    for (int64_t step = 0; step < 3; ++step) running->step(step);
    running->whole->param_groups()[0].options().set_lr(0.07);
    save(run, *running->state, {.step = 3});
    for (int64_t step = 3; step < 6; ++step) running->step(step);

    const auto resumed = start<Local>(GetParam(), Chosen(others), two_groups<Chosen>(others));
    const auto loaded = load(run, *resumed->state);
    EXPECT_THAT(loaded.differences, IsEmpty());
    EXPECT_TRUE(loaded.exact);
    for (int64_t step = 3; step < 6; ++step) resumed->step(step);
    EXPECT_EQ(difference(resumed->parameters(), running->parameters()), 0) << typeid(Local).name();
  };
  try_optimizer(std::type_identity<SGD>(), fast, of_biases, SGDOptions(1));
  if (GetParam() == "local_updates") return;
  const AdafactorOptions rows = AdafactorOptions(0.05).eps1(1e-6).d(2).beta1(0.5);
  const AdafactorOptions none = AdafactorOptions(0.01).beta1(0.5);
  try_optimizer(std::type_identity<Adafactor>(), rows, none, AdafactorOptions(1).beta1(0.1).eps1(1e-3));
  const LambOptions lamb = LambOptions(0.05).betas({0.8, 0.7}).bias_correction(false);
  try_optimizer(std::type_identity<Lamb>(), lamb, LambOptions(0.01).always_adapt(false), LambOptions(1));
}

// Param groups in another order and composition; other strategies.
TEST_P(ParamGroupOptions, BEY05_options_follow_parameters_into_other_groups) {
  const SharedFolder folder;
  const auto running = start<SGD>("ddp", fast, two_groups(of_biases));
  for (int64_t step = 0; step < 2; ++step) running->step(step);
  save(folder / "run", *running->state);
  const auto turned = [](Mlp& model) {
    Groups groups;
    for (const auto& parameter : model->parameters()) groups.emplace_back(std::vector<at::Tensor>{parameter});
    return groups;
  };
  const auto resumed = start<SGD>(GetParam(), SGDOptions(1), turned);
  const auto loaded = load(folder / "run", *resumed->state);
  EXPECT_THAT(loaded.differences, IsEmpty());
  for (size_t i = 0; i < resumed->model->parameters().size(); ++i) {
    const auto& options = static_cast<const SGDOptions&>(resumed->whole->param_groups()[i].options());
    const bool bias = resumed->model->parameters()[i].dim() == 1;
    EXPECT_EQ(options.lr(), bias ? 0.3 : 0.1);
    EXPECT_EQ(options.momentum(), bias ? 0.5 : 0.9);
    EXPECT_EQ(options.dampening(), bias ? 0.1 : 0);
    EXPECT_TRUE(options.nesterov());
  }
  const auto together = start<SGD>(GetParam(), SGDOptions(1), [](Mlp& model) {
    Groups groups;
    groups.emplace_back(model->parameters());
    return groups;
  });
  const auto mixed = load(folder / "run", *together->state);
  EXPECT_FALSE(mixed.exact);
  EXPECT_THAT(mixed.differences, ElementsAre(HasSubstr("param group 0: its parameters had different options")));
  EXPECT_EQ(together->whole->param_groups()[0].options().get_lr(), 1);
}

INSTANTIATE_TEST_SUITE_P(All, ParamGroupOptions, testing::Values("ddp", "zero1", "megatron", "fsdp", "local_updates"),
                         [](const auto& info) { return info.param; });

TEST(TrainingCheckpoint, BEY05_options_that_differ_are_named) {
  const SharedFolder folder;
  const auto running = start<SGD>("zero1", fast, two_groups(of_biases));
  running->step(0);
  save(folder / "run", *running->state);
  const SGDOptions here = SGDOptions(0.01).momentum(0.9).weight_decay(0.2);
  {
    const auto resumed = start<SGD>("zero1", here, two_groups(of_biases));
    const auto loaded = load(folder / "run", *resumed->state, {.options = false});
    EXPECT_FALSE(loaded.exact);
    EXPECT_THAT(loaded.differences, ElementsAre("param group 0: nesterov is false, in the checkpoint true",
                                                "param group 1: nesterov is false, in the checkpoint true"));
    EXPECT_EQ(resumed->whole->param_groups()[0].options().get_lr(), 0.1);
  }
  {
    const auto resumed = start<SGD>("zero1", here, two_groups(of_biases));
    const auto loaded = load(folder / "run", *resumed->state, {.rates = false});
    EXPECT_THAT(loaded.differences, ElementsAre("param group 0: lr is 0.01, in the checkpoint 0.1"));
    EXPECT_EQ(resumed->whole->param_groups()[0].options().get_lr(), 0.01);
  }
  {  // a command line that says the same again
    const auto resumed = start<SGD>("zero1", fast, two_groups(of_biases));
    EXPECT_TRUE(load(folder / "run", *resumed->state, {.rates = false, .options = false}).exact);
  }
  // Adam's weight decay differs from AdamW's, although their states have the same fields.
  const torch::optim::AdamOptions adam = torch::optim::AdamOptions(0.02).weight_decay(0.5);
  const auto with_adam = start<torch::optim::Adam>("ddp", adam, two_groups(adam));
  with_adam->step(0);
  save(folder / "adam", *with_adam->state);
  const torch::optim::AdamWOptions adamw(0.01);
  const auto with_adamw = start<torch::optim::AdamW>("ddp", adamw, two_groups(adamw));
  const auto loaded = load(folder / "adam", *with_adamw->state);
  EXPECT_FALSE(loaded.exact);
  ASSERT_EQ(loaded.differences.size(), 2U);
  EXPECT_THAT(loaded.differences[0], AllOf(HasSubstr("AdamWOptions"), HasSubstr("AdamOptions")));
  EXPECT_EQ(with_adamw->whole->param_groups()[0].options().get_lr(), 0.02);
}

// Older checkpoints: rates by param group, and the position of one schedule.
TEST(TrainingCheckpoint, BEY05_checkpoints_that_have_rates_alone_still_load) {
  const SharedFolder folder;
  const auto model = std::make_shared<Net>(1);
  FusedAdamW optimizer(trainable(*model), adamw);
  LinearWarmup schedule(optimizer, 10);
  TrainingState training(model, optimizer, group());
  training.with(schedule);
  auto contents = contents_of(*checkpoint_source(model, optimizer, group()), group(), {}, {.step = 3});
  contents.global_state.erase("param_groups");
  contents.global_state["rates"] = {0.125};
  CheckpointSaver(group(), folder / "run").save(contents);
  auto without_rates = contents;
  without_rates.global_state.erase("rates");
  CheckpointSaver(group(), folder / "without").save(without_rates);
  contents.global_state["schedule"] = 4;
  CheckpointSaver(group(), folder / "scheduled").save(contents);

  const auto expect_named = [](const Loaded& loaded) {
    EXPECT_FALSE(loaded.exact);
    EXPECT_THAT(loaded.differences, testing::Contains(HasSubstr("no options of param groups but learning rates")));
  };
  expect_named(load(folder / "scheduled", training));
  EXPECT_EQ(schedule.position(), 4);
  FusedAdamW plain(trainable(*model), adamw);
  TrainingState without(model, plain, group());
  expect_named(load(folder / "run", without));
  EXPECT_EQ(plain.param_groups()[0].options().get_lr(), 0.125);
  EXPECT_EQ(static_cast<const torch::optim::AdamWOptions&>(plain.param_groups()[0].options()).weight_decay(), 0.1);
  const auto bare = load(folder / "without", without);
  EXPECT_FALSE(bare.exact);
  EXPECT_THAT(bare.differences, ElementsAre("the checkpoint has no options of param groups; they keep theirs"));
}

TEST(TrainingCheckpoint, BEY05_options_that_are_not_what_shoal_writes_are_refused) {
  const SharedFolder folder;
  const auto model = std::make_shared<Net>(1);
  FusedAdamW optimizer(trainable(*model), adamw);
  TrainingState training(model, optimizer, group());
  auto contents = contents_of(*checkpoint_source(model, optimizer, group()), group(), {}, {});
  const auto good = contents.global_state.at("param_groups");
  const auto before = model->fc->weight.clone();
  const std::vector<nlohmann::json> bad{
      {{"lr", "fast"}}, {{"betas", {0.9}}}, {{"betas", {0.9, true}}}, {{"eps", nullptr}}, nullptr};
  for (const auto& options : bad) {
    contents.step += 1;
    contents.global_state["param_groups"] = good;
    contents.global_state["param_groups"][0]["options"].update(options.is_null() ? nlohmann::json::object() : options);
    if (options.is_null()) contents.global_state["param_groups"][0]["options"] = 5;
    CheckpointSaver(group(), folder / "run").save(contents);
    EXPECT_THAT(refusal<CheckpointError>([&] { load(folder / "run", training); }), HasSubstr("\"param_groups\""))
        << options;
  }
  EXPECT_TRUE(at::equal(model->fc->weight, before));
  EXPECT_EQ(static_cast<const torch::optim::AdamWOptions&>(optimizer.param_groups()[0].options()).eps(), 1e-8);
}

// A custom schedule, whose rate is a function of libtorch's step count.
class Cosine : public torch::optim::LRScheduler {
 public:
  explicit Cosine(torch::optim::Optimizer& optimizer) : LRScheduler(optimizer), base_(get_current_lrs()) {}

 private:
  std::vector<double> get_lrs() override {
    auto rates = base_;
    for (auto& rate : rates) rate *= 0.5 + 0.5 * std::cos(std::numbers::pi * (step_count_ + 1) / 10);
    return rates;
  }
  std::vector<double> base_;
};

std::vector<double> rates_of(torch::optim::Optimizer& optimizer) {
  std::vector<double> rates;
  for (const auto& group : optimizer.param_groups()) rates.push_back(group.options().get_lr());
  return rates;
}

// Schedules continue with the same rates in every later step, under every strategy.
template <class Step, class Make>
void expect_schedule_goes_on(const std::string& strategy, const Step& step, const Make& make) {
  const SharedFolder folder;
  const auto running = start<SGD>(strategy, fast, two_groups(of_biases));
  auto schedules = make(*running->whole);
  std::apply([&](auto&... each) { (running->state->with(*each), ...); }, schedules);
  std::vector<std::vector<double>> expected;
  for (int64_t number = 0; number < 12; ++number) {
    running->step(number);
    std::apply([&](auto&... each) { (step(*each, number), ...); }, schedules);
    if (number == 4) save(folder / "run", *running->state, {.step = 5});
    expected.push_back(rates_of(*running->whole));
  }
  for (const bool used : {false, true}) {
    const auto resumed = start<SGD>(strategy, fast, two_groups(of_biases));
    auto again = make(*resumed->whole);
    std::apply([&](auto&... each) { (resumed->state->with(*each), ...); }, again);
    if (used) {
      for (int64_t number = 0; number < 3; ++number)
        std::apply([&](auto&... each) { (step(*each, number), ...); }, again);
    }
    const auto loaded = load(folder / "run", *resumed->state);
    EXPECT_THAT(loaded.differences, IsEmpty());
    EXPECT_TRUE(loaded.exact);
    for (int64_t number = 5; number < 12; ++number) {
      resumed->step(number);
      std::apply([&](auto&... each) { (step(*each, number), ...); }, again);
      EXPECT_EQ(rates_of(*resumed->whole), expected[number]) << strategy << " step " << number;
    }
    EXPECT_EQ(difference(resumed->parameters(), running->parameters()), 0);
  }
}

class Schedules : public testing::TestWithParam<std::string> {};

TEST_P(Schedules, BEY05_libtorchs_go_on) {
  using torch::optim::Optimizer;
  using torch::optim::ReduceLROnPlateauScheduler;
  using torch::optim::StepLR;
  const auto step = [](torch::optim::LRScheduler& schedule, int64_t) { schedule.step(); };
  expect_schedule_goes_on(GetParam(), step,
                          [](Optimizer& optimizer) { return std::tuple(std::make_unique<StepLR>(optimizer, 3, 0.5)); });
  expect_schedule_goes_on(GetParam(), step,
                          [](Optimizer& optimizer) { return std::tuple(std::make_unique<Cosine>(optimizer)); });
  expect_schedule_goes_on(GetParam(), step, [](Optimizer& optimizer) {
    return std::tuple(std::make_unique<StepLR>(optimizer, 3, 0.5), std::make_unique<StepLR>(optimizer, 4, 0.9));
  });
  // The metric improves at first and then stops: rates fall, with a cooldown.
  const auto metric = [](ReduceLROnPlateauScheduler& schedule, int64_t number) {
    schedule.step(number < 3 ? 1.0F / static_cast<float>(number + 1) : 0.5F);
  };
  expect_schedule_goes_on(GetParam(), metric, [](Optimizer& optimizer) {
    return std::tuple(std::make_unique<ReduceLROnPlateauScheduler>(
        optimizer, ReduceLROnPlateauScheduler::min, 0.5F, 1, 1e-4, ReduceLROnPlateauScheduler::rel, 1,
        std::vector<float>(optimizer.param_groups().size(), 0)));
  });
}

INSTANTIATE_TEST_SUITE_P(All, Schedules, testing::Values("ddp", "zero1", "megatron", "fsdp", "local_updates"),
                         [](const auto& info) { return info.param; });

TEST(TrainingCheckpoint, BEY05_schedules_that_do_not_fit_are_named) {
  const SharedFolder folder;
  const auto running = start<SGD>("ddp", fast, two_groups(of_biases));
  torch::optim::StepLR schedule(*running->whole, 2);
  save(folder / "without", *running->state);
  running->state->with(schedule);
  save(folder / "with", *running->state);
  const auto resumed = start<SGD>("ddp", fast, two_groups(of_biases));
  auto loaded = load(folder / "with", *resumed->state);
  EXPECT_FALSE(loaded.exact);
  EXPECT_THAT(loaded.differences, ElementsAre(HasSubstr("the state of 1 schedules")));
  torch::optim::ReduceLROnPlateauScheduler other(*resumed->whole);
  resumed->state->with(other);
  loaded = load(folder / "with", *resumed->state);
  EXPECT_THAT(loaded.differences,
              ElementsAre(HasSubstr("a ReduceLROnPlateauScheduler, which keeps its initial state")));
  loaded = load(folder / "without", *resumed->state);
  EXPECT_THAT(loaded.differences,
              ElementsAre(HasSubstr("a ReduceLROnPlateauScheduler, which keeps its initial state")));
}

class BareModule : public testing::TestWithParam<std::string> {};

TEST_P(BareModule, BEY05_takes_what_any_strategy_has_trained) {
  const SharedFolder folder;
  const auto running = test::start(GetParam(), group(), 1);
  train(*running, group(), 0, 3);
  save(folder / "run", *running->state, {.step = 3});
  Net net(7);
  const auto loaded = load_module(folder / "run", net);
  EXPECT_EQ(loaded.step, 3);
  EXPECT_EQ(loaded.ranks, group().size());
  const CheckpointReader reader(folder / "run");
  for (const auto& entry : net.named_parameters()) {
    EXPECT_TRUE(same_bits(reader.read(entry.key()).to(at::kFloat), entry.value().detach())) << entry.key();
  }
  for (const auto& entry : net.named_buffers()) {
    EXPECT_TRUE(same_bits(reader.read(entry.key()).to(entry.value().scalar_type()), entry.value())) << entry.key();
  }
  net.eval();
  EXPECT_EQ(net.forward(images(0, 1)).sizes(), (std::vector<int64_t>{4, 5}));
}

INSTANTIATE_TEST_SUITE_P(All, BareModule, testing::ValuesIn(all_strategies()),
                         [](const auto& info) { return info.param; });

// Its names are those that a checkpoint gives to what belongs to one rank.
struct WithRanks : torch::nn::Module {
  WithRanks() {
    weight = register_parameter("weight", at::zeros({2}));
    const auto ranks = register_module("ranks", std::make_shared<torch::nn::Module>());
    of_rank = ranks->register_module("0", std::make_shared<torch::nn::Module>())
                  ->register_parameter("weight", at::full({2}, 7.0F));
  }
  at::Tensor weight, of_rank;
};

TEST(TrainingCheckpoint, BEY05_a_partial_load_takes_nothing_of_one_rank_for_the_models) {
  const SharedFolder folder;
  const auto ones = at::ones({2});
  CheckpointSaver(group(), folder / "run")
      .save({.step = 1,
             .strategy = "test",
             .slices = {whole_slice("weight", ones), whole_slice("ranks.0.weight", ones, "ranks")}});
  const auto model = std::make_shared<WithRanks>();
  const auto loaded = load_module(folder / "run", *model, {.partial = true});
  EXPECT_THAT(loaded.differences, ElementsAre("missing: ranks.0.weight"));
  EXPECT_TRUE(at::equal(model->weight, ones));
  EXPECT_TRUE(at::equal(model->of_rank, at::full({2}, 7.0F)));

  SGD optimizer(std::vector<at::Tensor>{model->weight, model->of_rank}, SGDOptions(0.1));
  TrainingState training(model, optimizer, group());
  load(folder / "run", training, {.partial = true});
  EXPECT_TRUE(at::equal(model->of_rank, at::full({2}, 7.0F)));
}

TEST(TrainingCheckpoint, BEY05_a_bare_module_that_does_not_fit_stays_as_it_was) {
  const SharedFolder folder;
  const auto running = test::start("ddp", group(), 1);
  save(folder / "run", *running->state);
  Mlp other = seeded(1);
  const auto before = other->first->weight.clone();
  EXPECT_THAT(refusal([&] { load_module(folder / "run", other); }),
              AllOf(HasSubstr("missing: first.bias"), HasSubstr("extra: conv.bias")));
  EXPECT_TRUE(at::equal(other->first->weight, before));
  torch::nn::Linear fc(11, 5);
  load_module(folder / "run", fc, {.prefix = "fc."});
  EXPECT_TRUE(at::equal(fc->weight, running->model->fc->weight));
  EXPECT_THROW(load_module(folder / "nothing", fc), CheckpointError);
}

}  // namespace
}  // namespace shoal::test::checkpoint_options_test
