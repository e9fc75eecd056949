// Checkpoints of whole trainings: exact resume, and any strategy from any other.

#include "tests/strategy/checkpoint/checkpoint_training.h"

#include <gmock/gmock.h>

#include "shoal/error.h"
#include "tests/support/refusal.h"

namespace shoal::checkpoint_test {
namespace {

using test::expect_buffers;
using test::expect_holds;
using test::first_ranks;
using test::refusal;
using test::same_bits;
using test::SharedFolder;
using test::start;
using test::Tensors;
using test::train;
using ::testing::AllOf;
using ::testing::HasSubstr;

const Group& group() {
  return test::world().group();
}

TEST(TrainingCheckpoint, BEY05_OSS07_MEG11_FSDP17_every_tensor_stays_through_a_chain_of_strategies) {
  const SharedFolder folder;
  const std::vector<std::pair<std::string, int>> chain{{"fsdp", 4},          {"zero1", 3}, {"megatron", 2},
                                                       {"decentralized", 2}, {"ddp", 1},   {"fsdp", 4}};
  std::filesystem::path last;
  for (size_t i = 0; i < chain.size(); ++i) {
    const auto& [strategy, wanted] = chain[i];
    SCOPED_TRACE(strategy + " at " + std::to_string(wanted));
    if (const auto ranks = first_ranks(std::min(wanted, group().size()))) {
      const auto running = start(strategy, *ranks, static_cast<int>(i));
      if (i == 0) {
        train(*running, *ranks, 0, 3);
      } else {
        const auto loaded = load(last, *running->state);
        EXPECT_EQ(loaded.step, static_cast<int64_t>(i) - 1);
        EXPECT_EQ(loaded.strategy, chain[i - 1].first);
        expect_holds(*running, CheckpointReader(folder / "run-0"));
        expect_buffers(*running, CheckpointReader(folder / "run-0"));
      }
      save(folder / ("run-" + std::to_string(i)), *running->state, {.step = static_cast<int64_t>(i)});
      expect_holds(*running, CheckpointReader(folder / ("run-" + std::to_string(i))));
    }
    last = folder / ("run-" + std::to_string(i));
    group().barrier().wait();
  }
}

// Strategies, some of them with hooks.
std::vector<std::string> resumed() {
  auto names = test::all_strategies();
  names.insert(names.end(),
               {"ddp_powersgd", "zero1_int8", "zero2_topk", "megatron_int8", "fsdp_topk", "fsdp_hybrid_topk"});
  return names;
}

class Resume : public testing::TestWithParam<std::string> {};

// Parameters, buffers, and everything that determines later steps.
TEST_P(Resume, BEY05_BEY06_goes_on_as_if_it_had_never_ended) {
  if (GetParam() == "none" && group().transport() == "gloo" && group().size() > 2) {
    GTEST_SKIP() << "sums depend on buckets, of which a training without its wrapper knows nothing";
  }
  const SharedFolder folder;
  Tensors expected;
  std::vector<at::Tensor> buffers;
  {
    const auto running = start(GetParam(), group(), 1);
    train(*running, group(), 0, 3);
    save_async(folder / "run", *running->state,
               {.step = 3, .position = "sample " + std::to_string(group().rank()), .keep_last = 1});
    train(*running, group(), 3, 7);
    running->state->wait();
    expected = running->parameters();
    for (const auto& buffer : running->model->buffers()) buffers.push_back(buffer.clone());
  }
  group().barrier().wait();
  for (const bool used : {false, true}) {  // a training that was only made, and one that has trained differently
    SCOPED_TRACE(used);
    const auto running = start(GetParam(), group(), 2);
    if (used) train(*running, group(), 50, 52);
    const auto loaded = load(folder / "run", *running->state);
    EXPECT_TRUE(loaded.exact);
    EXPECT_EQ(loaded.step, 3);
    EXPECT_EQ(loaded.position, "sample " + std::to_string(group().rank()));
    train(*running, group(), 3, 7);
    for (const auto& [name, value] : running->parameters()) EXPECT_TRUE(same_bits(value, expected[name])) << name;
    for (size_t i = 0; i < buffers.size(); ++i) EXPECT_TRUE(same_bits(running->model->buffers()[i], buffers[i])) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(All, Resume, testing::ValuesIn(resumed()), [](const auto& info) { return info.param; });

// A hook's state is restored for the same strategy with the same number of ranks, and nowhere else.
TEST(TrainingCheckpoint, BEY05_a_hook_begins_anew_elsewhere) {
  const SharedFolder folder;
  const auto running = start("ddp_powersgd", group(), 1);
  train(*running, group(), 0, 3);
  save(folder / "run", *running->state, {.step = 3});
  const CheckpointReader reader(folder / "run");
  EXPECT_TRUE(reader.index().tensors.contains("ranks.0.strategy:hook.factor.fc.weight"));
  EXPECT_TRUE(reader.index().tensors.contains("ranks.0.strategy:hook.owed.fc.weight"));
  // Without the hook's state, the same parameters and optimizer train differently.
  const auto with = start("ddp_powersgd", group(), 2), without = start("ddp", group(), 2);
  EXPECT_TRUE(load(folder / "run", *with->state).exact);
  EXPECT_THAT(load(folder / "run", *without->state).differences, testing::ElementsAre(testing::HasSubstr("hook was")));
  expect_holds(*without, reader);
  const auto elsewhere = start("megatron_int8", group(), 2);
  EXPECT_FALSE(load(folder / "run", *elsewhere->state).exact);
  expect_holds(*elsewhere, reader);
}

// theta, its momentum and the step count are restored with any number of ranks.
TEST(TrainingCheckpoint, BEY05_diloco_goes_on_at_another_number_of_ranks) {
  const SharedFolder folder;
  const auto running = start("diloco", group(), 1);
  train(*running, group(), 0, 5);
  save(folder / "run", *running->state, {.step = 5});
  const auto before = std::static_pointer_cast<LocalUpdates>(running->wrapper)->state_dict();
  if (const auto ranks = first_ranks(std::max(1, group().size() - 1))) {
    const auto other = start("diloco", *ranks, 2);
    load(folder / "run", *other->state);
    const auto after = std::static_pointer_cast<LocalUpdates>(other->wrapper)->state_dict();
    ASSERT_EQ(after.size(), before.size());
    for (const auto& [name, entry] : before) {
      EXPECT_EQ(after.at(name).numbers, entry.numbers) << name;
      ASSERT_EQ(after.at(name).tensors.size(), entry.tensors.size()) << name;
      for (const auto& [field, value] : entry.tensors) {
        EXPECT_TRUE(same_bits(after.at(name).tensors.at(field), value)) << name << ' ' << field;
      }
    }
    train(*other, *ranks, 5, 8);
  }
  group().barrier().wait();
}

// A decentralised rank has parameters of its own; other strategies load their mean.
TEST(TrainingCheckpoint, BEY05_other_strategies_get_the_mean_of_decentralised_ranks) {
  const SharedFolder folder;
  const auto running = start("decentralized", group(), 1);
  train(*running, group(), 0, 4);
  save(folder / "run", *running->state);
  const CheckpointReader reader(folder / "run");
  for (const auto& [name, own] : running->parameters()) {
    auto all = at::empty({group().size() * own.numel()}, own.options());
    group().all_gather(all, own.contiguous().view({-1})).wait();
    const auto mean = all.view({group().size(), -1}).to(at::kDouble).mean(0).to(at::kFloat).view(own.sizes());
    EXPECT_TRUE(at::allclose(reader.read(name), mean, 1e-6, 1e-7)) << name;
  }
}

TEST(TrainingCheckpoint, BEY05_what_does_not_fit_is_named_and_nothing_changes) {
  const SharedFolder folder;
  const auto running = start("fsdp", group(), 1);
  train(*running, group(), 0, 2);
  save(folder / "run", *running->state, {.step = 2});
  auto fc = std::make_shared<torch::nn::Module>();
  const auto child = fc->register_module("fc", torch::nn::Linear(11, 6));
  fc->register_module("extra", torch::nn::Linear(2, 2));
  FusedAdamW optimizer(fc->parameters(), test::adamw);
  TrainingState training(fc, optimizer, group());
  const auto before = child->weight.clone();
  EXPECT_THAT(refusal([&] { load(folder / "run", training); }),
              AllOf(HasSubstr("missing: extra.bias, extra.weight"), HasSubstr("extra: conv.bias, conv.weight"),
                    HasSubstr("fc.weight is [5, 11], wanted is [6, 11]")));
  EXPECT_TRUE(at::equal(child->weight, before));
}

TEST(TrainingCheckpoint, BEY05_part_of_a_model_and_models_without_optimizer) {
  const SharedFolder folder;
  const auto running = start("zero1", group(), 1);
  train(*running, group(), 0, 2);
  save(folder / "run", *running->state, {.step = 2});
  auto module = std::make_shared<torch::nn::Module>();
  const auto fc = module->register_module("fc", torch::nn::Linear(11, 5));
  const auto head = module->register_module("head", torch::nn::Linear(2, 2));
  const auto head_before = head->weight.clone();
  FusedAdamW optimizer(module->parameters(), test::adamw);
  TrainingState training(module, optimizer, group());
  load(folder / "run", training, {.partial = true});
  EXPECT_TRUE(same_bits(fc->weight.detach(), running->parameters()["fc.weight"]));
  EXPECT_TRUE(at::equal(head->weight, head_before));
  EXPECT_TRUE(optimizer.state().empty());

  // Another optimizer's state is refused, but the model can be loaded.
  auto net = std::make_shared<test::Net>(5);
  torch::optim::SGD sgd(test::trainable(*net), torch::optim::SGDOptions(0.1).momentum(0.9));
  TrainingState other(net, sgd, group());
  const auto before = net->fc->weight.clone();
  EXPECT_THAT(refusal([&] { load(folder / "run", other); }), HasSubstr("momentum_buffer"));
  EXPECT_TRUE(at::equal(net->fc->weight, before));
  load(folder / "run", other, {.model_only = true});
  for (const auto& [name, value] : running->parameters()) {
    EXPECT_TRUE(same_bits(net->named_parameters()[name].detach(), value)) << name;
  }
}

TEST(TrainingCheckpoint, MEG11_BEY05_scaler_schedule_and_rates_come_back) {
  const SharedFolder folder;
  const auto model = std::make_shared<test::Net>(1);
  FusedAdamW optimizer(test::trainable(*model), test::adamw);
  GradScaler scaler({.initial_scale = 1024, .growth_interval = 3});
  LinearWarmup schedule(optimizer, 10);
  TrainingState training(model, optimizer, group());
  training.with(scaler).with(schedule);
  for (int i = 0; i < 4; ++i) {
    scaler.update(false);
    schedule.step();
  }
  save(folder / "run", training, {.step = 4});
  const auto rate = optimizer.param_groups()[0].options().get_lr();
  const auto state = scaler.state();
  scaler.update(true);
  scaler.update(true);
  for (int i = 0; i < 3; ++i) schedule.step();
  ASSERT_NE(optimizer.param_groups()[0].options().get_lr(), rate);
  load(folder / "run", training);
  EXPECT_EQ(schedule.position(), 4);
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), rate);
  EXPECT_EQ(scaler.state().scale, state.scale);
  EXPECT_EQ(scaler.state().good_steps, state.good_steps);
  // Without a schedule, the rates themselves are restored.
  FusedAdamW plain(test::trainable(*model), test::adamw);
  TrainingState without(model, plain, group());
  load(folder / "run", without);
  EXPECT_EQ(plain.param_groups()[0].options().get_lr(), rate);
}

}  // namespace
}  // namespace shoal::checkpoint_test
