// Checkpoints of DecentralizedDataParallel: what ranks hold beside their model.

#include <gmock/gmock.h>
#include <torch/autograd.h>
#include <torch/optim/sgd.h>

#include "checkpoint/saving/saver.h"
#include "engine/checkpoint/contents.h"
#include "shoal/checkpoint.h"
#include "shoal/decentralized.h"
#include "tests/support/models.h"
#include "tests/support/shared_folder.h"
#include "tests/support/world.h"

namespace shoal::test::checkpoint_decentralized_test {
namespace {

using torch::optim::SGD;
using torch::optim::SGDOptions;
using Parallel = DecentralizedDataParallel<MlpImpl>;
using Options = DecentralizedDataParallelOptions;

const SGDOptions fast = SGDOptions(0.1).momentum(0.9).weight_decay(0.2).nesterov(true);

std::unique_ptr<Parallel> make(const Mlp& model, const SGDOptions& sgd, const Options& options = {}) {
  return std::make_unique<Parallel>(model, optimizer_recipe<SGD>(sgd), group(), options);
}

void train(Parallel& parallel, int64_t from, int64_t to) {
  for (int64_t step = from; step < to; ++step) {
    mean_loss(parallel.forward(batch(group().rank(), step))).backward();
  }
}

// Its optimizers are made in the first step.
TEST(TrainingCheckpoint, BEY05_a_decentralised_training_that_has_not_begun_keeps_options_and_optimizer_state) {
  const SharedFolder folder;
  auto trained = make(seeded(1), fast);
  train(*trained, 0, 1);
  const auto state = trained->state_dict();
  trained.reset();
  const auto saved = make(seeded(2), fast);
  saved->load_state_dict(state);
  TrainingState training(*saved);
  save(folder / "run", training);
  const auto resumed = make(seeded(3), SGDOptions(7));
  TrainingState again(*resumed);
  const auto loaded = load(folder / "run", again);
  EXPECT_TRUE(loaded.exact);
  EXPECT_THAT(loaded.differences, testing::IsEmpty());
  for (const auto* optimizer : resumed->optimizers()) {
    const auto& options = static_cast<const SGDOptions&>(optimizer->param_groups()[0].options());
    EXPECT_EQ(options.lr(), fast.lr());
    EXPECT_EQ(options.momentum(), fast.momentum());
  }
  const auto restored = resumed->state_dict();
  for (const auto& [name, named] : state) {
    const auto& momentum = restored.at(name).tensors.at("momentum_buffer");
    EXPECT_TRUE(at::equal(momentum, named.tensors.at("momentum_buffer"))) << name;
  }
}

// A load makes the buckets, but ranks exchange their weights in the first step nevertheless.
TEST(TrainingCheckpoint, BEY04_BEY05_the_first_step_after_another_trainings_state_knows_all_weights) {
  const SharedFolder folder;
  const auto trained = make(seeded(1), fast);
  train(*trained, 0, 2);
  TrainingState training(*trained);
  save(folder / "run", training);
  auto model = seeded(2);
  const auto resumed = make(model, SGDOptions(0.1));
  TrainingState again(*resumed);
  const int ranks = group().size();
  const auto weight = 1.0 + group().rank();
  const auto mean_weight = (1.0 + ranks) / 2;
  for (int time = 0; time < 2; ++time) {  // the second time into a training that has begun
    load(folder / "run", again, {.model_only = true});
    auto expected = copies(*model);
    const auto x = batch(group().rank(), time);
    const auto gradients = torch::autograd::grad({model->forward(x).pow(2).sum()}, model->parameters());
    for (size_t i = 0; i < expected.size(); ++i) expected[i] -= 0.1 * gradients[i] / mean_weight;
    resumed->backward(resumed->forward(x).pow(2).sum(), weight);
    EXPECT_LT(difference(model->parameters(), expected), 1e-12) << time;
  }
  group().barrier().wait();
}

Options compressed(const std::string& topology, const CompressedExchange& how) {
  return {.topology = make_topology(topology, group().size()),
          .neighbour_timeout_seconds = 60,
          .bucket_cap_mb = 0.001,
          .compressed_exchange = how};
}

TEST(TrainingCheckpoint, BEY05_BEY22_a_compressed_exchange_goes_on_with_its_copies) {
  for (const auto* topology : {"complete", "ring", "one-peer-exp"}) {
    for (const CompressedExchange how : {CompressedExchange{}, CompressedExchange{.top_k = 0.1}}) {
      SCOPED_TRACE(std::string(topology) + (how.top_k ? " top_k" : " int8"));
      const SharedFolder folder;
      const auto model = seeded(1);
      auto parallel = make(model, fast, compressed(topology, how));
      TrainingState training(*parallel);
      train(*parallel, 0, 5);
      save(folder / "run", training, {.step = 5});
      train(*parallel, 5, 12);
      const auto expected = copies(*model);
      EXPECT_TRUE(load(folder / "run", training).exact);
      train(*parallel, 5, 12);
      EXPECT_EQ(difference(model->parameters(), expected), 0) << "reset to an older checkpoint";
      EXPECT_EQ(parallel->statistics().skipped, 0);
      const auto other = seeded(2);
      const auto resumed = make(other, fast, compressed(topology, how));
      TrainingState again(*resumed);
      EXPECT_TRUE(load(folder / "run", again).exact);
      train(*resumed, 5, 12);
      EXPECT_EQ(difference(other->parameters(), expected), 0) << "in a new training";
      EXPECT_EQ(resumed->statistics().skipped, 0);
      group().barrier().wait();
    }
  }
}

TEST(TrainingCheckpoint, BEY05_BEY22_copies_that_a_checkpoint_lacks_are_named_and_begin_with_the_parameters) {
  const SharedFolder folder;
  const auto options = compressed("complete", {.top_k = 0.05, .rate = 1});
  const auto parallel = make(seeded(1), fast, options);
  train(*parallel, 0, 5);
  auto contents = contents_of(*checkpoint_source(*parallel), group(), {}, {.step = 5});
  std::erase_if(contents.slices,
                [](const NamedSlice& slice) { return slice.name.find(":copy.") != std::string::npos; });
  CheckpointSaver(group(), folder / "run").save(contents);
  const auto model = seeded(2);
  const auto resumed = make(model, SGDOptions(0), options);
  TrainingState training(*resumed);
  const auto loaded = load(folder / "run", training, {.rates = false, .options = false});
  EXPECT_FALSE(loaded.exact);
  EXPECT_THAT(loaded.differences, testing::Contains(testing::HasSubstr("copies for the compressed exchange")));
  if (group().size() > 1) {
    EXPECT_GT(resumed->consensus_distance(), 1e-6);
  }
  train(*resumed, 5, 6);  // without learning: the copies equal the parameters, so ranks agree at once
  EXPECT_LT(resumed->consensus_distance(), 1e-6);
  group().barrier().wait();
}

}  // namespace
}  // namespace shoal::test::checkpoint_decentralized_test
