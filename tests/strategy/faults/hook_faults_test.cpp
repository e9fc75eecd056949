// Hooks that fail, differ between ranks, or do not fit the strategy.

#include <fmt/format.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "shoal/error.h"
#include "shoal/hooks.h"
#include "tests/support/models.h"
#include "tests/support/training.h"
#include "tests/support/world.h"

namespace shoal::hook_faults_test {
namespace {

using test::batch;
using test::difference;
using test::group;
using test::mean_loss;
using test::Training;

const auto sgd = torch::optim::SGDOptions(0.1).momentum(0.9);

// Hook that sums in two collectives, the second of which follows at the end of backward; fails on request.
class Faulty : public SumHook {
 public:
  PendingExchange begin(const GradientBucket& bucket) override {
    if (bucket.label.bucket == 1 && std::exchange(fail, false)) throw std::runtime_error("injected");
    auto number = at::ones({1}, at::kInt);
    PendingExchange first{.work = bucket.group.all_reduce(number, ReduceOp::sum, bucket.label)};
    return chain(std::move(first), [this, bucket, number] {
      EXPECT_EQ(number.item<int>(), group().size());
      return SumHook::begin(bucket);
    });
  }
  bool serves(SumResult result) const override { return result == SumResult::all_ranks; }
  void reset() override { ++resets; }
  bool fail = false;
  int resets = 0;
};

class FaultyOfOne : public Faulty {
 public:
  PendingExchange begin(const GradientBucket& bucket) override {
    if (bucket.label.bucket == 1 && std::exchange(fail, false)) throw std::runtime_error("injected");
    return SumHook::begin(bucket);
  }
  bool serves(SumResult) const override { return true; }
};

// Fails when the sum has come, on a rank that has to make something of it.
class FaultyAtTheEnd : public Faulty {
 public:
  PendingExchange begin(const GradientBucket& bucket) override {
    auto pending = SumHook::begin(bucket);
    if (bucket.label.bucket == 1 && std::exchange(fail, false)) {
      pending.finish = [] { throw std::runtime_error("injected"); };
    }
    return pending;
  }
  bool serves(SumResult) const override { return true; }
};

Training<test::MlpImpl> make(const std::string& strategy, std::shared_ptr<CommunicationHook> hook) {
  return Training<test::MlpImpl>::make<torch::optim::SGD>(strategy, test::seeded(3).ptr(), group(), sgd,
                                                          {.bucket_mb = 1e-3, .hook = std::move(hook)});
}

void train(Training<test::MlpImpl>& training, int64_t step) {
  training.zero_grad();
  mean_loss(training.forward(batch(group().rank(), step))).backward();
  training.step();
}

std::vector<at::Tensor> reference(const std::vector<int64_t>& steps) {
  auto model = test::seeded(3);
  torch::optim::SGD optimizer(model->parameters(), sgd);
  for (const auto step : steps) {
    optimizer.zero_grad();
    for (int rank = 0; rank < group().size(); ++rank) {
      (mean_loss(model->forward(batch(rank, step))) / group().size()).backward();
    }
    optimizer.step();
  }
  return model->parameters();
}

template <class Hook>
void break_and_train_on(const std::string& strategy, int faulty) {
  SCOPED_TRACE(fmt::format("{}, rank {}", strategy, faulty));
  const auto hook = std::make_shared<Hook>();
  auto training = make(strategy, hook);
  train(training, 0);
  const bool here = group().rank() == faulty;
  hook->fail = here;
  try {
    train(training, 10);
    ADD_FAILURE() << "the step succeeded";
  } catch (const StepAbandoned& error) {
    EXPECT_FALSE(here) << error.what();
    EXPECT_NE(std::string(error.what()).find(fmt::format("rank {}", faulty)), std::string::npos) << error.what();
  } catch (const std::runtime_error& error) {
    EXPECT_TRUE(here) << error.what();
    EXPECT_STREQ(error.what(), "injected");
    training.abandon_step();
  }
  EXPECT_EQ(hook->resets, 1) << "what was carried over is forgotten on every rank";
  for (const int64_t step : {20, 21, 22}) train(training, step);
  EXPECT_LT(difference(training.model->parameters(), reference({0, 20, 21, 22})), 1e-12);
}

TEST(HookFaults, BEY10_a_hook_that_throws_ends_the_step_on_all_ranks) {
  for (const int faulty : {0, group().size() - 1}) {
    for (const auto* strategy : {"ddp", "zero2", "megatron", "fsdp", "fsdp_no_shard"}) {
      break_and_train_on<FaultyOfOne>(strategy, faulty);
      break_and_train_on<FaultyAtTheEnd>(strategy, faulty);
    }
    for (const auto* strategy : {"ddp", "zero1"}) break_and_train_on<Faulty>(strategy, faulty);
  }
}

TEST(HookFaults, DDP11_a_hook_for_whole_sums_is_refused_where_gradients_are_sharded) {
  for (const auto* strategy : {"zero2", "megatron", "fsdp"}) {
    try {
      make(strategy, std::make_shared<Faulty>());
      ADD_FAILURE() << strategy << " took it";
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find("take another hook"), std::string::npos) << error.what();
    }
  }
  make("ddp", std::make_shared<Faulty>());
  make("fsdp_no_shard", std::make_shared<Faulty>());
}

TEST(HookFaults, DDP11_ranks_with_different_hooks_are_told_so) {
  for (const auto* strategy : {"ddp", "zero2", "megatron", "fsdp"}) {
    try {
      make(strategy, std::make_shared<CompressHook>(group().rank() == 0 ? at::kHalf : at::kBFloat16));
      ADD_FAILURE() << strategy << " took them";
    } catch (const DisagreeError& error) {
      EXPECT_NE(std::string(error.what()).find("communication_hook"), std::string::npos) << error.what();
    }
  }
}

TEST(HookFaults, DDP11_wrong_options_are_refused) {
  EXPECT_THROW(CompressHook{at::kFloat}, UsageError);
  EXPECT_THROW(SumHook().load_state({{"weight", at::ones({1})}}), UsageError);
}

}  // namespace
}  // namespace shoal::hook_faults_test
