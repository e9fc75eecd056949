// Programs that go on where they were, and that fine-tune, as a user writes them.

#include <gmock/gmock.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <fstream>
#include <sstream>

#include "checkpoint/format/safetensors.h"
#include "shoal/checkpoint.h"
#include "shoal/ddp.h"
#include "shoal/fsdp.h"
#include "shoal/optim.h"
#include "tests/support/models.h"
#include "tests/support/refusal.h"
#include "tests/support/shared_folder.h"
#include "tests/support/world.h"

namespace shoal::test {
namespace {

using testing::Contains;
using testing::HasSubstr;

constexpr int64_t steps = 6;

// A program that is started again until it is done; it ends early after `until` steps.
struct Program {
  std::vector<at::Tensor> parameters;
  int64_t first = 0;
  bool found = false;
  bool exact = false;
};
Program run_program(const std::filesystem::path& folder, int64_t until) {
  const auto model = seeded(3);
  DistributedDataParallel parallel(model, group());
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  TrainingState training(parallel, optimizer);
  Program program;
  if (const auto loaded = load_latest(folder, training)) {
    program.found = true;
    program.exact = loaded->exact;
    program.first = loaded->step;
  }
  for (int64_t step = program.first; step < until; ++step) {
    optimizer.zero_grad();
    mean_loss(parallel.forward(batch(group().rank(), step))).backward();
    optimizer.step();
    if ((step + 1) % 2 == 0) save(folder, training, {.step = step + 1});
  }
  program.parameters = copies(*model);
  return program;
}

TEST(LoadLatest, BEY05_a_program_that_is_started_again_ends_as_if_it_had_run_through) {
  const SharedFolder whole, parts;
  const auto expected = run_program(whole / "run", steps);
  EXPECT_FALSE(expected.found) << "no folder yet";
  EXPECT_EQ(run_program(parts / "run", 3).first, 0);
  const auto ended = run_program(parts / "run", steps);
  EXPECT_EQ(ended.first, 2) << "the last save";
  EXPECT_TRUE(ended.exact);
  EXPECT_EQ(difference(ended.parameters, expected.parameters), 0);
  const auto again = run_program(parts / "run", steps);
  EXPECT_EQ(again.first, steps) << "nothing is left to do";
  EXPECT_EQ(difference(again.parameters, expected.parameters), 0);
}

TEST(LoadLatest, BEY05_an_empty_folder_changes_nothing_and_load_refuses_it) {
  const SharedFolder folder;
  const auto model = seeded(3);
  DistributedDataParallel parallel(model, group());
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  TrainingState training(parallel, optimizer);
  const auto before = copies(*model);
  EXPECT_FALSE(load_latest(folder / "none", training));
  EXPECT_EQ(difference(copies(*model), before), 0);
  EXPECT_THAT(refusal<Error>([&] { load(folder / "none", training); }), HasSubstr("none"));
}

TEST(LoadLatest, BEY05_what_differs_from_the_checkpoint_is_listed) {
  const SharedFolder folder;
  {
    const auto model = seeded(3);
    DistributedDataParallel parallel(model, group());
    torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
    TrainingState training(parallel, optimizer);
    mean_loss(parallel.forward(batch(group().rank(), 0))).backward();
    optimizer.step();
    save(folder / "run", training, {.step = 1});
  }
  const auto model = seeded(4);
  DistributedDataParallel parallel(model, group());
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3).weight_decay(0.2));
  TrainingState training(parallel, optimizer);
  const auto loaded = load_latest(folder / "run", training, {.options = false});
  ASSERT_TRUE(loaded);
  EXPECT_FALSE(loaded->exact);
  EXPECT_THAT(loaded->differences, Contains(HasSubstr("weight_decay")));
  EXPECT_EQ(static_cast<const torch::optim::AdamWOptions&>(optimizer.param_groups()[0].options()).weight_decay(), 0.2);
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 1e-2) << "rates are loaded";
  const auto same = load_latest(folder / "run", training);
  EXPECT_TRUE(same->exact);
  EXPECT_THAT(same->differences, testing::IsEmpty());
}

// The body of a trained model, with a head of another size.
struct WithOtherHeadImpl : torch::nn::Module {
  WithOtherHeadImpl() {
    first = register_module("first", torch::nn::Linear(12, 16));
    second = register_module("second", torch::nn::Linear(16, 16));
    head = register_module("head", torch::nn::Linear(16, 3));
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) { return head(torch::tanh(second(torch::tanh(first(x))))); }
  torch::nn::Linear first{nullptr}, second{nullptr}, head{nullptr};
};

TEST(PartialLoad, BEY05_fine_tuning_takes_the_body_keeps_the_new_head_and_says_what_they_do_not_share) {
  const SharedFolder folder;
  std::vector<at::Tensor> trained;
  {
    const auto model = seeded(3);
    DistributedDataParallel parallel(model, group());
    torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
    TrainingState training(parallel, optimizer);
    mean_loss(parallel.forward(batch(group().rank(), 0))).backward();
    optimizer.step();
    save(folder / "run", training, {.step = 1});
    trained = copies(*model);
  }
  torch::manual_seed(9);
  const auto model = std::make_shared<WithOtherHeadImpl>();
  FullyShardedDataParallel parallel(model, group());
  FullyShardedOptimizer<FusedAdamW> optimizer(parallel, torch::optim::AdamWOptions(1e-2));
  TrainingState training(parallel, optimizer);
  at::Tensor head;
  {
    const auto whole = parallel.summon_full_params();
    head = model->head->weight.detach().clone();
  }
  EXPECT_THAT(refusal([&] { load(folder / "run", training); }), HasSubstr("missing: head.bias, head.weight"));
  load(folder / "run", training, {.partial = true});
  {
    const auto whole = parallel.summon_full_params();
    EXPECT_TRUE(at::equal(model->first->weight, trained[0])) << "of another strategy";
    EXPECT_TRUE(at::equal(model->second->bias, trained[3]));
    EXPECT_TRUE(at::equal(model->head->weight, head)) << "keeps its values";
  }
  mean_loss(parallel.forward(batch(group().rank(), 1))).backward();
  EXPECT_TRUE(optimizer.step().updated) << "training begins anew";

  const auto alone = std::make_shared<WithOtherHeadImpl>();
  const auto loaded = load_module(folder / "run", *alone, {.partial = true});
  EXPECT_TRUE(at::equal(alone->first->weight, trained[0]));
  EXPECT_THAT(loaded.differences, Contains(HasSubstr("head.weight")));
  EXPECT_THAT(loaded.differences, Contains(HasSubstr("third.weight")));
  EXPECT_FALSE(loaded.exact);
}

struct TiedImpl : torch::nn::Module {
  TiedImpl() : weight(register_parameter("weight", at::ones({3, 3}))) { register_parameter("tied", weight); }
  at::Tensor forward(const at::Tensor& x) { return x.mm(weight).mm(weight); }
  at::Tensor weight;
};

TEST(PtFile, BEY05_a_changed_bit_of_any_tensor_is_an_error_on_all_ranks) {
  const SharedFolder folder;
  const auto model = seeded(3);
  const auto path = folder / "model.pt";
  for (const auto& parameter : model->parameters()) {
    if (group().rank() == 0) {
      save_module(path, *model);
      std::stringstream read;
      read << std::ifstream(path, std::ios::binary).rdbuf();
      auto bytes = read.str();
      const std::string values(static_cast<const char*>(parameter.data_ptr()), parameter.nbytes());
      const auto place = bytes.find(values);
      ASSERT_NE(place, std::string::npos);
      bytes[place + 1] = static_cast<char>(bytes[place + 1] ^ 0x40);
      std::ofstream(path, std::ios::binary) << bytes;
    }
    group().barrier().wait();
    const auto loaded = seeded(3);
    FullyShardedDataParallel parallel(loaded, group());
    FullyShardedOptimizer<torch::optim::AdamW> optimizer(parallel, torch::optim::AdamWOptions(1e-2));
    TrainingState training(parallel, optimizer);
    EXPECT_THAT(refusal<CheckpointError>([&] { load(path, training, {.model_only = true}); }),
                HasSubstr("model.pt is damaged: the storage of tensor "));
    EXPECT_NO_THROW(load(path, training, {.model_only = true, .verify = false}));
    group().barrier().wait();
  }
}

TEST(TiedWeights, BEY05_are_loaded_from_files_that_have_them_under_both_names) {
  const SharedFolder folder;
  const auto twos = at::full({3, 3}, 2.0F);
  if (group().rank() == 0) {
    save_safetensors(folder / "both.safetensors", {{"weight", twos}, {"tied", twos}}, {});
    save_safetensors(folder / "untied.safetensors", {{"weight", twos}, {"tied", at::zeros({3, 3})}}, {});
  }
  group().barrier().wait();
  {
    const auto model = std::make_shared<TiedImpl>();
    DistributedDataParallel parallel(model, group());
    torch::optim::AdamW optimizer(std::vector<at::Tensor>{model->weight}, torch::optim::AdamWOptions(1e-2));
    TrainingState training(parallel, optimizer);
    load(folder / "both.safetensors", training, {.model_only = true});
    EXPECT_TRUE(at::equal(model->weight, twos));
    EXPECT_THAT(refusal([&] { load(folder / "untied.safetensors", training, {.model_only = true}); }),
                HasSubstr("extra: tied (not equal to weight"));
  }
  const auto model = std::make_shared<TiedImpl>();
  FullyShardedDataParallel parallel(model, group());
  FullyShardedOptimizer<FusedAdamW> optimizer(parallel, torch::optim::AdamWOptions(1e-2));
  TrainingState training(parallel, optimizer);
  load(folder / "both.safetensors", training, {.model_only = true});
  const auto whole = parallel.summon_full_params();
  EXPECT_TRUE(at::equal(model->weight, twos));
}

// As a file of a program that registers them in the other order, or one that has each tensor once.
TEST(TiedWeights, BEY05_are_loaded_from_files_that_have_them_under_another_of_their_names) {
  const SharedFolder folder;
  const auto twos = at::full({3, 3}, 2.0F);
  if (group().rank() == 0) save_safetensors(folder / "other.safetensors", {{"tied", twos}}, {});
  group().barrier().wait();
  for (const bool partial : {false, true}) {
    const auto model = std::make_shared<TiedImpl>();
    EXPECT_THAT(load_module(folder / "other.safetensors", *model, {.partial = partial}).differences,
                testing::IsEmpty());
    EXPECT_TRUE(at::equal(model->weight, twos));
    const auto trained = std::make_shared<TiedImpl>();
    FullyShardedDataParallel parallel(trained, group());
    FullyShardedOptimizer<FusedAdamW> optimizer(parallel, torch::optim::AdamWOptions(1e-2));
    TrainingState training(parallel, optimizer);
    load(folder / "other.safetensors", training, {.partial = partial, .model_only = true});
    const auto whole = parallel.summon_full_params();
    EXPECT_TRUE(at::equal(trained->weight, twos));
  }
}

// The same tensors in the other order.
struct OtherwiseTiedImpl : torch::nn::Module {
  OtherwiseTiedImpl() : weight(register_parameter("tied", at::ones({3, 3}))) { register_parameter("weight", weight); }
  at::Tensor forward(const at::Tensor& x) { return x.mm(weight).mm(weight); }
  at::Tensor weight;
};

TEST(TiedWeights, BEY05_a_checkpoint_has_their_optimizer_state_under_any_of_their_names) {
  const SharedFolder folder;
  const auto run = [&]<class Module>(const std::shared_ptr<Module>& model, double rate, const auto& use) {
    DistributedDataParallel<Module> parallel(model, group());
    torch::optim::AdamW optimizer(std::vector<at::Tensor>{model->weight}, torch::optim::AdamWOptions(rate));
    TrainingState training(parallel, optimizer);
    const auto step = [&] {
      mean_loss(parallel.forward(at::ones({2, 3}))).backward();
      optimizer.step();
      optimizer.zero_grad();
    };
    use(training, step);
    EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.25);
  };
  const auto saved = std::make_shared<TiedImpl>();
  const auto loaded = std::make_shared<OtherwiseTiedImpl>();
  run(saved, 0.25, [&](TrainingState& training, const auto& step) {
    step();
    save(folder / "run", training, {.step = 1});
    step();
  });
  run(loaded, 0.5, [&](TrainingState& training, const auto& step) {
    EXPECT_TRUE(load(folder / "run", training).exact);
    step();
  });
  EXPECT_TRUE(at::equal(saved->weight, loaded->weight));
}

}  // namespace
}  // namespace shoal::test
