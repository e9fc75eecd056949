// Every strategy of the registry, trained through the registry alone with options given as text, equals one process on
// the whole batch. Where ranks have models of their own, each of them gets the whole batch.

#include <gmock/gmock.h>
#include <torch/nn/utils/clip_grad.h>

#include "shoal/data.h"
#include "shoal/metrics.h"
#include "shoal/schedules.h"
#include "shoal/training.h"
#include "tests/support/models.h"
#include "tests/support/processes.h"
#include "tests/support/refusal.h"
#include "tests/support/shared_folder.h"
#include "tests/support/variants.h"
#include "tests/support/world.h"

namespace shoal::test {
namespace {

constexpr int steps = 4;
constexpr int micros = 2;
constexpr double largest_norm = 0.05;  // less than any here
const auto sgd = torch::optim::SGDOptions(0.1).momentum(0.9);

// Several buckets, units and fragments of a small model; exchanges after every step that change nothing where ranks
// have the same.
const StrategyOptions small{
    {"bucket_cap_mb", "0.0005"}, {"first_bucket_mb", "0.0005"}, {"bucket_size", "100"}, {"reduce_buffer_size", "100"},
    {"unit_numel", "100"},       {"sync_every", "1"},           {"outer_lr", "1"},      {"outer_momentum", "0"}};

bool shares_batches(const Strategy& strategy) {
  return strategy.synchronization == Synchronization::lockstep && !strategy.has("sync_every");
}

at::Tensor whole_batch(int64_t step, int64_t micro) {
  return batch(0, step, micro, /*samples=*/12);
}

// One process: the whole batch, libtorch's optimizer and its clipping.
std::vector<at::Tensor> reference() {
  auto model = seeded(3);
  torch::optim::SGD optimizer(model->parameters(), sgd);
  for (int64_t step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    for (int64_t micro = 0; micro < micros; ++micro) {
      (mean_loss(model->forward(whole_batch(step, micro))) / micros).backward();
    }
    const double norm = torch::nn::utils::clip_grad_norm_(model->parameters(), largest_norm);
    EXPECT_GT(norm, largest_norm) << "clipping takes part";
    optimizer.step();
  }
  return model->parameters();
}

// Where one rank is all that a strategy has.
Group group_of(const Strategy& strategy) {
  return strategy.synchronization == Synchronization::single_rank ? group().subgroup({group().rank()}) : group();
}

void train(Training<MlpImpl>& training, int64_t from, int64_t to) {
  const auto& ranks = training->group();
  const bool shares = shares_batches(training->strategy());
  for (int64_t step = from; step < to; ++step) {
    for (int64_t micro = 0; micro < micros; ++micro) {
      const auto all = whole_batch(step, micro);
      const auto mine = shares ? all.chunk(ranks.size())[ranks.rank()] : all;
      const auto scope = training->no_sync(micro + 1 < micros);
      training->backward(mean_loss(training.forward(mine)) / micros);
    }
    EXPECT_TRUE(training->step());
    training->zero_grad();
  }
}

// Collective.
std::vector<at::Tensor> whole(Training<MlpImpl>& training) {
  const auto scope = training->full_parameters();
  std::vector<at::Tensor> list;
  for (const auto& parameter : training.module()->parameters()) list.push_back(parameter.detach().clone());
  return list;
}

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
  if (group().rank() == 0) {
    const auto ended = run({PYTHON, "-c", doubled, (folder / "").string()}, 60);
    EXPECT_EQ(ended.code, 0) << ended.output;
  }
  group().barrier().wait();
  for (const auto& [name, values] : saved) {
    for (const auto& [extension, factor] : {std::pair(".pt", 2), std::pair(".safetensors", 1)}) {
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

// A rank trains its own layer itself, with gradients that are no other rank's.
TEST(Training, ignored_parameters_do_not_count_in_the_norm) {
  TrainingOptions options{.clip_grad = largest_norm};
  options.ignored = {"first.weight", "first.bias"};
  auto training = make_training("ddp", seeded(3), optimizer_recipe<FusedSGD>(sgd), group(), options);
  const auto& own = training.module()->first->weight;
  for (int64_t step = 0; step < 3; ++step) {
    training->backward(mean_loss(training(batch(group().rank(), step))) * (1 + group().rank()));
    const auto before = own.grad().clone();
    training->step();
    EXPECT_TRUE(at::equal(own.grad(), before)) << "left to the program";
    training->zero_grad();
  }
  for (const auto& entry : training.module()->named_parameters()) {
    if (entry.key().starts_with("first.")) continue;
    auto first = entry.value().detach().clone();
    group().broadcast(first, 0).wait();
    EXPECT_TRUE(at::equal(first, entry.value())) << entry.key() << " differs on rank " << group().rank();
  }
}

TEST(Training, a_tied_parameter_is_ignored_by_any_of_its_names) {
  for (const auto* strategy : {"ddp", "zero1", "local_sgd"}) {
    for (const auto* name : {"second.weight", "again.weight"}) {
      auto model = seeded(3);
      model->register_module("again", model->second);
      const auto before = model->second->weight.detach().clone();
      auto training =
          make_training(strategy, model, optimizer_recipe<torch::optim::SGD>(sgd), group(), {.ignored = {name}});
      training->backward(mean_loss(training(batch(group().rank(), 0))));
      training->step();
      EXPECT_TRUE(at::equal(model->second->weight, before)) << strategy << " has trained " << name;
    }
  }
}

// libtorch's parameters() are such a list if a submodule has two names.
TEST(Training, a_parameter_that_is_listed_twice_is_unscaled_and_clipped_once) {
  const auto twice = [](const torch::nn::Module& module) {
    auto list = module.parameters();
    list.push_back(list.front());
    OptimizerRecipe::ParamGroups groups;
    groups.emplace_back(std::move(list));
    return groups;
  };
  auto model = seeded(3);
  mean_loss(model->forward(whole_batch(0, 0))).backward();
  torch::nn::utils::clip_grad_norm_(model->parameters(), largest_norm);
  TrainingOptions options{.clip_grad = largest_norm};
  options.precision.scaler = GradScalerOptions{.initial_scale = 1024};
  for (const auto* strategy : {"ddp", "local", "local_sgd"}) {
    auto training =
        make_training(strategy, seeded(3), optimizer_recipe<torch::optim::SGD>(sgd, twice), group(), options);
    training->backward(mean_loss(training(whole_batch(0, 0))));
    training->step();
    EXPECT_LT(difference(gradients(*training.module()), gradients(*model)), 1e-9) << strategy;
  }
}

TEST(Training, wrong_options_are_refused_on_every_rank) {
  const auto make = [](const std::string& name, const StrategyOptions& options, double clip) {
    make_training(name, seeded(3), optimizer_recipe<FusedSGD>(sgd), group(), {.options = options, .clip_grad = clip});
  };
  EXPECT_THROW(make("zero9", {}, 0), UsageError);
  EXPECT_THROW(make("ddp", {{"unit_numel", "5"}}, 0), StrategyOptionError);
  EXPECT_THROW(make("ddp", {}, -1), UsageError);
}

TEST(Training, what_would_have_no_effect_is_refused) {
  const auto refusal = [](const std::string& name, const OptimizerRecipe& recipe, const TrainingOptions& options) {
    try {
      make_training(name, seeded(3), recipe, group(), options);
    } catch (const UsageError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const auto recipe = optimizer_recipe<FusedSGD>(sgd);
  const auto hook = std::make_shared<CompressHook>(at::kBFloat16);
  const ScheduleFactory schedule = [](torch::optim::Optimizer& optimizer) {
    return std::make_unique<LinearWarmup>(optimizer, 10);
  };
  for (const auto* name : {"ddp", "zero2", "fsdp", "megatron", "local_sgd"}) {
    EXPECT_THAT(refusal(name, recipe, {.schedule = schedule}), testing::HasSubstr("takes no schedule")) << name;
    EXPECT_THAT(refusal(name, {}, {}), testing::HasSubstr("lacks `make` or `defaults`")) << name;
  }
  for (const auto* name : {"decentralized", "local_sgd", "local"}) {
    EXPECT_THAT(refusal(name, recipe, {.communication_hook = hook}), testing::HasSubstr("reduces no gradients"))
        << name;
  }
  EXPECT_THAT(refusal("ddp", recipe, {.options = {{"compress", "fp16"}}, .communication_hook = hook}),
              testing::HasSubstr("exclude each other"));
}

TEST(Training, a_recipe_takes_a_learning_rate_alone) {
  auto training = make_training("zero1", seeded(3), optimizer_recipe<torch::optim::SGD>(0.05), group());
  training->backward(mean_loss(training(whole_batch(0, 0))));
  training->step();
  auto model = seeded(3);
  torch::optim::SGD optimizer(model->parameters(), 0.05);
  mean_loss(model->forward(whole_batch(0, 0))).backward();
  optimizer.step();
  EXPECT_LT(difference(training.module()->parameters(), model->parameters()), 1e-12);
}

}  // namespace
}  // namespace shoal::test
