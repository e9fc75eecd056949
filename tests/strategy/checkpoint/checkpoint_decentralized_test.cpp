// Checkpoints of DecentralizedDataParallel: what ranks hold beside their model.

#include <gmock/gmock.h>
#include <torch/optim/sgd.h>

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
  return std::make_unique<Parallel>(model, optimizer_with<SGD>(sgd), group(), options);
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

}  // namespace
}  // namespace shoal::test::checkpoint_decentralized_test
