// Every strategy of the registry, trained through the registry alone with options given as text, equals one process on
// the whole batch. Where ranks have models of their own, each of them gets the whole batch.

#include <gmock/gmock.h>

#include "shoal/data.h"
#include "shoal/metrics.h"
#include "shoal/training.h"
#include "tests/support/models.h"
#include "tests/support/processes.h"
#include "tests/support/refusal.h"
#include "tests/support/shared_folder.h"
#include "tests/support/variants.h"
#include "tests/support/world.h"
#include "tests/training/whole_batch.h"

namespace shoal::test::training_test {
namespace {

using namespace whole_batches;  // NOLINT(google-build-using-namespace): helpers of this folder's tests

class EveryStrategy : public testing::TestWithParam<std::string> {
 protected:
  static Training<MlpImpl> make(const StrategyOptions& more = {}, int seed = 3) {
    return make_in(group_of(find_strategy(GetParam())), more, seed);
  }
  static Training<MlpImpl> make_in(const Group& ranks, const StrategyOptions& more = {}, int seed = 3) {
    Variant chosen{GetParam(), more};
    add_known(chosen, small);
    return make_training(GetParam(), seeded(seed), optimizer_recipe<FusedSGD>(sgd), ranks,
                         {.options = chosen.options, .clip_grad = largest_norm, .precision = Precision::float64()});
  }
};

TEST_P(EveryStrategy, equals_one_process_on_the_whole_batch) {
  auto training = make();
  train(training, 0, steps);
  EXPECT_LT(difference(whole(training), reference()), 1e-9);
}

// As hybrid strategies have groups of their own, and FSDP over sockets one for gathers.
TEST_P(EveryStrategy, counts_the_calls_of_all_its_groups) {
  const auto& strategy = find_strategy(GetParam());
  const auto log = std::make_shared<CallLog>();
  const auto apart = strategy.has("shard_size") ? StrategyOptions{{"shard_size", "1"}} : StrategyOptions();
  auto training = make_in(group_of(strategy).recorded(log), apart);
  train(training, 0, 1);
  log->clear();
  const auto before = training->statistics();
  train(training, 1, steps);
  const auto counted = training->statistics() - before;
  int64_t bytes = 0;
  for (const auto& record : log->records()) bytes += record.bytes;
  EXPECT_EQ(counted.calls, static_cast<int64_t>(log->records().size()));
  EXPECT_EQ(counted.bytes, bytes);
}

TEST_P(EveryStrategy, goes_on_from_its_checkpoint) {
  const SharedFolder folder;
  auto training = make();
  auto state = training->state();
  if (!state) {
    EXPECT_EQ(training->strategy().synchronization, Synchronization::independent)
        << "ranks that know nothing of each other have no checkpoint";
    return;
  }
  if (training->strategy().synchronization == Synchronization::single_rank && group().size() > 1)
    return;  // all ranks would write the same files
  train(training, 0, 2);
  save(folder / "run", *state, {.step = 2});
  auto other = make({}, /*seed=*/4);
  auto other_state = other->state();
  load(folder / "run", *other_state);
  train(other, 2, steps);
  EXPECT_LT(difference(whole(other), reference()), 1e-9);
}

// Ranks have equally many batches, as forwards may need; what is padding does not count.
TEST_P(EveryStrategy, evaluates_every_sample_once_on_all_ranks) {
  constexpr int64_t samples = 11;
  const auto data = batch(0, 0, 0, samples);
  auto training = make();
  MeanMetric loss(training->group()), negative(training->group());
  DistributedSampler sampler(samples, training->group(), {.shuffle = false});
  {
    const torch::NoGradGuard no_grad;
    size_t counted = 0;
    while (const auto indices = sampler.next(2)) {
      const auto rows = at::tensor(std::vector<int64_t>(indices->begin(), indices->end())).to(test_device());
      auto output = training.forward(data.index_select(0, rows));
      const auto here = std::min(indices->size(), sampler.unpadded() - counted);
      counted += here;
      output = output.narrow(0, 0, static_cast<int64_t>(here));
      if (here > 0) loss.update(mean_loss(output).item<double>(), static_cast<double>(here));
      negative.update(output.lt(0));
    }
  }
  const auto expected = seeded(3)->forward(data);
  EXPECT_NEAR(loss.compute(), mean_loss(expected).item<double>(), 1e-12);
  EXPECT_EQ(negative.compute(), expected.lt(0).sum().item<double>() / static_cast<double>(expected.numel()));
  train(training, 0, steps);
  EXPECT_LT(difference(whole(training), reference()), 1e-9) << "training goes on as if there had been no evaluation";
}

TEST_P(EveryStrategy, computes_in_the_dtype_that_is_asked_for) {
  const auto& strategy = find_strategy(GetParam());
  Variant chosen{strategy.name, {}};
  add_known(chosen, small);
  const auto in_float = [] {
    auto model = seeded(3);
    model->to(at::kFloat);
    return model;
  };
  auto training = make_training(strategy.name, in_float(), optimizer_recipe<FusedSGD>(sgd), group_of(strategy),
                                {.options = chosen.options, .precision = Precision::bf16_mixed()});
  const auto output = training.forward(whole_batch(0, 0).to(at::kFloat));
  EXPECT_EQ(output.scalar_type(), at::kBFloat16);
  training->backward(mean_loss(output.to(at::kFloat)));
  EXPECT_TRUE(training->step());
  const auto before = in_float()->parameters();
  const auto after = whole(training);
  for (size_t i = 0; i < after.size(); ++i) {
    EXPECT_EQ(after[i].scalar_type(), at::kFloat);
    EXPECT_FALSE(at::equal(after[i], before[i])) << i;
  }
}

TEST_P(EveryStrategy, abandons_a_step_that_has_not_begun) {
  if (GetParam() == "megatron") GTEST_SKIP() << "collective with the other ranks' step";
  auto training = make();
  training->abandon_step();
  train(training, 0, steps);
  EXPECT_LT(difference(whole(training), reference()), 1e-9);
}

TEST_P(EveryStrategy, says_what_it_holds) {
  auto training = make();
  train(training, 0, 1);
  EXPECT_EQ(training->strategy().name, GetParam());
  EXPECT_EQ(training->logging_data().has_value(), training->strategy().logging_data);
  EXPECT_EQ(training->exchanges() != nullptr, training->strategy().synchronization == Synchronization::asynchronous);
  EXPECT_FALSE(training->parameters().empty());
  EXPECT_FALSE(training->local_optimizers().empty());
  EXPECT_EQ(training->optimizer().param_groups().size(), 1U);
  EXPECT_EQ(training->first_active_rank(), 0);
}

TEST_P(EveryStrategy, refuses_to_ignore_what_the_module_does_not_have) {
  const auto& strategy = find_strategy(GetParam());
  EXPECT_THAT(test::refusal([&] {
                make_training(strategy.name, seeded(3), optimizer_recipe<FusedSGD>(sgd), group_of(strategy),
                              {.ignored = {"first.wieght"}});
              }),
              testing::HasSubstr("the module has no parameter or buffer named first.wieght"));
}

INSTANTIATE_TEST_SUITE_P(Registry, EveryStrategy, testing::ValuesIn(strategy_names()),
                         [](const auto& it) { return it.param; });

// Python doubles the weights of each strategy's file.
constexpr const char* doubled = R"(
import glob, sys, torch
for path in glob.glob(sys.argv[1] + "/*.pt"):
    torch.save({name: 2 * value for name, value in torch.load(path).items()}, path)
)";

TEST(Training, pt_files_go_to_python_and_back_under_every_strategy) {
  const SharedFolder folder;
  const auto make = [](const Strategy& strategy, int seed) {
    Variant chosen{strategy.name, {}};
    add_known(chosen, small);
    return make_training(strategy.name, seeded(seed), optimizer_recipe<FusedSGD>(sgd), group_of(strategy),
                         {.options = chosen.options, .precision = Precision::float64()});
  };
  std::map<std::string, std::vector<at::Tensor>> saved;
  for (const auto& name : strategy_names()) {
    const auto& strategy = find_strategy(name);
    if (strategy.synchronization == Synchronization::single_rank && group().rank() > 0)
      continue;  // all ranks would write the same file
    auto training = make(strategy, 3);
    train(training, 0, 2);
    saved[name] = whole(training);
    training->save_module(folder / (name + ".pt"));
    training->save_module(folder / (name + ".safetensors"));
  }
  group().barrier().wait();
  // To start Python takes most of the test's time, and it cannot tell how many ranks have written a file.
  const bool through_python = group().size() == 2;
  if (through_python && group().rank() == 0) {
    const auto ended = run({PYTHON, "-c", doubled, (folder / "").string()}, 60);
    EXPECT_EQ(ended.code, 0) << ended.output;
  }
  group().barrier().wait();
  for (const auto& [name, values] : saved) {
    for (const auto& [extension, factor] : {std::pair(".pt", through_python ? 2 : 1), std::pair(".safetensors", 1)}) {
      auto training = make(find_strategy(name), 4);
      auto state = training->state();
      if (state) {
        load(folder / (name + extension), *state, {.model_only = true});
      } else {
        load_module(folder / (name + extension), *training.module());
      }
      auto expected = values;
      for (auto& value : expected) value = factor * value;
      EXPECT_EQ(difference(whole(training), expected), 0) << name << extension;
    }
  }
}

TEST(Training, a_file_that_cannot_be_written_is_an_error_on_every_rank) {
  auto training = make_training("fsdp", seeded(3), optimizer_recipe<FusedSGD>(sgd), group());
  EXPECT_THROW(training->save_module("/dev/null/model.pt"), CheckpointError);
  EXPECT_THROW(training->save_module("model.bin"), UsageError);
}

TEST(Training, updates_in_backward_are_an_option) {
  auto training = make_training(
      "ddp", seeded(3), optimizer_recipe<FusedSGD>(sgd), group(),
      {.options = {{"optimizer_in_backward", "exact"}}, .clip_grad = largest_norm, .precision = Precision::float64()});
  train(training, 0, steps);
  EXPECT_LT(difference(whole(training), reference()), 1e-9);
}

// Every rank trains with half the rate: what a program may make of its own.
class Halving : public TrainingCore {
 public:
  explicit Halving(const TrainingParts& parts)
      : TrainingCore(parts), optimizer_(parts.recipe.make(parts.recipe.groups(*parts.module))) {
    auto& rate = optimizer_->param_groups().front().options();
    rate.set_lr(rate.get_lr() * parts.values.number("factor"));
  }
  bool step() override {
    optimizer_->step();
    return true;
  }
  torch::optim::Optimizer& optimizer() override { return *optimizer_; }
  std::vector<const torch::optim::Optimizer*> local_optimizers() const override { return {optimizer_.get()}; }
  OptimizerState optimizer_state() override { return shoal::optimizer_state(*optimizer_, *module_); }
  std::optional<TrainingState> state() override { return std::nullopt; }

 private:
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

TEST(Training, a_programs_own_strategy_trains_by_its_name) {
  register_strategy(
      {.name = "halving",
       .help = "half the rate",
       .options =
           {{.name = "factor", .type = StrategyOption::Type::number, .default_value = "0.5", .help = "of the rate"}},
       .synchronization = Synchronization::independent,
       .make = [](const TrainingParts& parts) { return std::make_unique<Halving>(parts); }});
  const auto all = [](const torch::nn::Module& module) {
    OptimizerRecipe::ParamGroups groups;
    groups.emplace_back(module.parameters());
    return groups;
  };
  auto training =
      make_training("halving", seeded(3), optimizer_recipe<FusedSGD>(torch::optim::SGDOptions(0.1), all), group());
  auto model = seeded(3);
  torch::optim::SGD optimizer(model->parameters(), 0.05);
  const auto x = whole_batch(0, 0);
  training->backward(mean_loss(training.forward(x)));
  training->step();
  mean_loss(model->forward(x)).backward();
  optimizer.step();
  EXPECT_LT(difference(training.module()->parameters(), model->parameters()), 1e-12);
  EXPECT_THROW(training->backward(mean_loss(training.forward(x)), 3), UsageError) << "it has no such backward";
  const auto recipe = optimizer_recipe<FusedSGD>(torch::optim::SGDOptions(0.1), all);
  EXPECT_NE(test::refusal([&] {
              make_training("halving", seeded(3), recipe, group(), {.clip_grad = 1});
            }).find("make_training halving: the strategy does not clip"),
            std::string::npos);
  TrainingOptions scaled;
  scaled.precision.scaler = GradScalerOptions();
  EXPECT_NE(test::refusal([&] {
              make_training("halving", seeded(3), recipe, group(), scaled);
            }).find("make_training halving: the strategy has no loss scaler"),
            std::string::npos);
}

}  // namespace
}  // namespace shoal::test::training_test
