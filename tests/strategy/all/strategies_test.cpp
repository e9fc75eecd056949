// Properties of every synchronous strategy: the same training run, whatever is sharded.

#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <cmath>

#include "data/reference.h"
#include "models/loss.h"
#include "models/registry.h"
#include "shoal/optim.h"
#include "tests/support/models.h"
#include "tests/support/training.h"
#include "tests/support/world.h"

namespace shoal::strategies_test {
namespace {

using test::batch;
using test::difference;
using test::group;
using test::Training;

class Strategies : public testing::TestWithParam<std::string> {};

// Parameters after 20 steps on a built-in model.
template <class Optimizer, class Defaults>
std::vector<at::Tensor> train(const std::string& strategy, const std::string& name, const Defaults& defaults,
                              int micros, double clip = 0, std::shared_ptr<CommunicationHook> hook = nullptr) {
  auto training = Training<models::Model>::make<Optimizer>(
      strategy, models::make_model(name, "tiny", models::Init::reference, 1), group(), defaults,
      {.bucket_mb = 0.1, .clip = clip, .hook = std::move(hook)});
  for (int64_t step = 0; step < 20; ++step) {
    for (int micro = 0; micro < micros; ++micro) {
      const auto local = training.no_sync(micro + 1 < micros);
      const auto sample = data::reference_batch(name, "tiny",
                                                {.seed = 1,
                                                 .step = static_cast<uint64_t>(step),
                                                 .rank = static_cast<uint64_t>(group().rank()),
                                                 .micro = static_cast<uint64_t>(micro)},
                                                2);
      (models::loss_of(training.forward(sample.data), sample.target) / micros).backward();
    }
    training.step();
    training.zero_grad();
  }
  std::vector<at::Tensor> parameters;
  for (const auto& parameter : training.model->parameters()) parameters.push_back(parameter.detach().clone());
  return parameters;
}

// Sums up as fsdp_hybrid does on four ranks, in pairs and then across them. Rounding depends on it, and AdamW makes
// much of rounding: it divides gradients by their own size, also those that are nothing else (of a key's bias).
class InPairs : public CommunicationHook {
 public:
  InPairs() : pair_(pair_of(0, 1, 2, 3)), across_(pair_of(0, 2, 1, 3)) {}
  std::string name() const override { return "in pairs"; }
  PendingExchange begin(const GradientBucket& bucket) override {
    return chain({pair_.all_reduce(bucket.gradients)},
                 [this, sum = bucket.gradients] { return PendingExchange{across_.all_reduce(sum)}; });
  }

 private:
  static Group pair_of(int a, int b, int c, int d) {
    const bool first = group().rank() == a || group().rank() == b;
    return group().subgroup(first ? std::vector{a, b} : std::vector{c, d});
  }

  Group pair_, across_;
};

bool sums_in_pairs(const std::string& strategy) {
  return strategy == "fsdp_hybrid" && group().size() == 4;
}

// Those of DistributedDataParallel that sums in the strategy's order, trained once for all strategies.
template <class Optimizer, class Defaults>
const std::vector<at::Tensor>& reference(const std::string& strategy, const std::string& name, const Defaults& defaults,
                                         int micros, double clip = 0) {
  static std::map<std::tuple<bool, std::string, int, double>, std::vector<at::Tensor>> trained;
  const bool pairs = sums_in_pairs(strategy);
  auto& parameters = trained[{pairs, name, micros, clip}];
  if (parameters.empty()) {
    parameters = train<Optimizer>("ddp", name, defaults, micros, clip, pairs ? std::make_shared<InPairs>() : nullptr);
  }
  return parameters;
}

// Equal to the last bit, but over Gloo, which does not add in rank order.
void expect_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  if (group().transport() == "gloo") {
    EXPECT_LT(difference(a, b), 1e-5);
    return;
  }
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << "parameter " << i;
}

const auto adamw = torch::optim::AdamWOptions(1e-3).weight_decay(0.1);
const auto sgd = torch::optim::SGDOptions(0.01).momentum(0.9);

struct Run {
  const char* model;
  int micros;
  double clip;
  bool adaptive;  // AdamW; otherwise SGD
};

// Any two of a model, a number of micro-batches, clipping and an optimizer occur together; on an odd number of ranks
// each run has the other optimizer. A single rank, whose sums are its own, trains the smallest model only.
std::vector<Run> runs() {
  std::vector<Run> list{{"mlp", 1, 0, true},    {"mlp", 3, 0.5, false}, {"cnn", 3, 0, true},
                        {"cnn", 1, 0.5, false}, {"gpt", 1, 0.5, true},  {"gpt", 3, 0, false}};
  if (group().size() == 1) list.resize(2);
  for (auto& run : list) run.adaptive = run.adaptive == (group().size() % 2 == 0);
  return list;
}

TEST_P(Strategies, BEY18_every_bit_equals_ddp_after_20_steps) {
  for (const auto& [name, micros, clip, adaptive] : runs()) {
    SCOPED_TRACE(std::string(name) + ", micro-batches " + std::to_string(micros) + ", clip " + std::to_string(clip));
    if (adaptive) {
      expect_equal(train<FusedAdamW>(GetParam(), name, adamw, micros, clip),
                   reference<FusedAdamW>(GetParam(), name, adamw, micros, clip));
    } else {
      expect_equal(train<torch::optim::SGD>(GetParam(), name, sgd, micros, clip),
                   reference<torch::optim::SGD>(GetParam(), name, sgd, micros, clip));
    }
  }
  EXPECT_GT(difference(reference<torch::optim::SGD>("ddp", "mlp", sgd, 3, 0.5),
                       reference<torch::optim::SGD>("ddp", "mlp", sgd, 3)),
            1e-4)
      << "it does clip";
}

TEST_P(Strategies, BEY12_an_optimizer_with_norms_of_whole_parameters_equals_ddp) {
  if (GetParam() == "megatron_in_grads") GTEST_SKIP() << "refused: for element-wise optimizers";
  const LambOptions lamb(1e-2);
  expect_equal(train<Lamb>(GetParam(), "gpt", lamb, 1), reference<Lamb>(GetParam(), "gpt", lamb, 1));
}

TEST_P(Strategies, DEC15_moments_of_several_steps_equal_ddps) {
  // A large eps, and not gpt: gradients that are zero but for rounding would make steps as large as any other.
  const auto options = AccumAdamOptions(1e-2).weight_decay(0.1).eps(1e-3).accum_iter(3);
  expect_equal(train<AccumAdamW>(GetParam(), "mlp", options, 1), reference<AccumAdamW>(GetParam(), "mlp", options, 1));
}

TEST_P(Strategies, BEY19_the_first_step_is_a_real_step) {
  auto training = Training<test::MlpImpl>::make<torch::optim::SGD>(GetParam(), test::seeded(3).ptr(), group(),
                                                                   torch::optim::SGDOptions(0.1));
  auto reference = test::seeded(3);
  torch::optim::SGD optimizer(reference->parameters(), torch::optim::SGDOptions(0.1));
  training.zero_grad();
  test::mean_loss(training.forward(batch(group().rank(), 0))).backward();
  training.step();
  for (int rank = 0; rank < group().size(); ++rank) {
    (test::mean_loss(reference->forward(batch(rank, 0))) / group().size()).backward();
  }
  optimizer.step();
  EXPECT_LT(difference(training.model->parameters(), reference->parameters()), 1e-12);
}

// Uneven over ranks, micro-batches and steps; the last rank has none in the last step.
TEST_P(Strategies, BEY04_a_weighted_backward_gives_the_mean_over_all_samples) {
  auto training = Training<test::MlpImpl>::make<torch::optim::SGD>(GetParam(), test::seeded(3).ptr(), group(),
                                                                   torch::optim::SGDOptions(0.1));
  auto reference = test::seeded(3);
  torch::optim::SGD optimizer(reference->parameters(), torch::optim::SGDOptions(0.1));
  const auto samples = [](int rank, int micro, int64_t step) {
    const bool none = step == 2 && rank > 0 && rank == group().size() - 1;
    return none ? 0 : (rank == 0 ? 5 : 1) + 2 * micro + static_cast<int>(step);
  };
  for (int64_t step = 0; step < 3; ++step) {
    training.zero_grad();
    optimizer.zero_grad();
    for (int micro = 0; micro < 2; ++micro) {
      const auto local = training.no_sync(micro == 0);
      const auto count = samples(group().rank(), micro, step);
      const auto x = batch(group().rank(), step, micro, count);
      training.backward(training.forward(x).pow(2).sum(), count);
    }
    double count = 0;
    for (int rank = 0; rank < group().size(); ++rank) count += samples(rank, 0, step) + samples(rank, 1, step);
    for (int rank = 0; rank < group().size(); ++rank) {
      for (int micro = 0; micro < 2; ++micro) {
        const auto x = batch(rank, step, micro, samples(rank, micro, step));
        (reference->forward(x).pow(2).sum() / count).backward();
      }
    }
    training.step();
    optimizer.step();
    ASSERT_LT(difference(training.model->parameters(), reference->parameters()), 1e-12) << "step " << step;
  }
}

struct OptionalImpl : test::MlpImpl {
  at::Tensor forward(const at::Tensor& x, int uses) {
    auto y = torch::tanh(first(x));
    for (int i = 0; i < uses; ++i) y = torch::tanh(second(y));
    return third(y).pow(2).mean();
  }
};

void use_a_module_differently_often(const std::string& strategy) {
  const auto uses = [](int rank, int64_t step) { return static_cast<int>((rank + step) % 3); };
  const auto make = [] {
    torch::manual_seed(4);
    return std::make_shared<OptionalImpl>();
  };
  const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
  auto training = Training<OptionalImpl>::make<torch::optim::SGD>(strategy, make(), group(), options,
                                                                  {.find_unused_parameters = true, .bucket_mb = 1e-3});
  const auto reference = make();
  torch::optim::SGD optimizer(reference->parameters(), options);
  for (int64_t step = 0; step < 4; ++step) {
    training.zero_grad();
    optimizer.zero_grad();
    training.forward(batch(group().rank(), step), uses(group().rank(), step)).backward();
    for (int rank = 0; rank < group().size(); ++rank) {
      (reference->forward(batch(rank, step), uses(rank, step)) / group().size()).backward();
    }
    training.step();
    optimizer.step();
    ASSERT_LT(difference(training.model->parameters(), reference->parameters()), 1e-12) << "step " << step;
  }
}

TEST_P(Strategies, BEY02_ranks_may_use_a_module_differently_often_or_not_at_all) {
  use_a_module_differently_often(GetParam());
}

// Strategies whose other tests are those of a relative of theirs above.
class Variants : public testing::TestWithParam<std::string> {};

TEST_P(Variants, BEY02_ranks_may_use_a_module_differently_often_or_not_at_all) {
  use_a_module_differently_often(GetParam());
}

INSTANTIATE_TEST_SUITE_P(All, Variants,
                         testing::Values("megatron_no_overlap", "megatron_late_gather", "fsdp_grad_op", "fsdp_no_shard",
                                         "fsdp_hybrid_grad_op"),
                         [](const auto& info) { return info.param; });

// With a rate of 1 and no momentum an update is the clipped gradient: its norm is exact, whatever pieces ranks hold and
// whenever buckets leave. oss_state_test OSS10 and megatron_test MEG10 show that inf on one rank skips all.
TEST_P(Strategies, BEY07_the_norm_of_a_clipped_update_is_the_one_asked_for) {
  constexpr double wanted = 1e-3;
  auto training = Training<test::MlpImpl>::make<torch::optim::SGD>(
      GetParam(), test::seeded(3).ptr(), group(), torch::optim::SGDOptions(1), {.bucket_mb = 1e-3, .clip = wanted});
  for (int64_t step = 0; step < 3; ++step) {
    std::vector<at::Tensor> before;
    for (const auto& parameter : training.model->parameters()) before.push_back(parameter.detach().clone());
    training.zero_grad();
    test::mean_loss(training.forward(batch(group().rank(), step))).backward();
    training.step();
    double square = 0;
    for (size_t i = 0; i < before.size(); ++i) {
      square += (training.model->parameters()[i].detach() - before[i]).pow(2).sum().item<double>();
    }
    EXPECT_NEAR(std::sqrt(square), wanted, 1e-4 * wanted) << "step " << step;
  }
}

// Communicating every micro-batch gives what communicating the last one gives.
TEST_P(Strategies, BEY08_micro_batches_may_be_summed_up_at_once_or_one_by_one) {
  const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
  for (const int micros : {1, 2, 4, 8}) {
    std::vector<std::vector<at::Tensor>> results;
    for (const bool each : {false, true}) {
      auto training = Training<test::MlpImpl>::make<torch::optim::SGD>(GetParam(), test::seeded(3).ptr(), group(),
                                                                       options, {.bucket_mb = 1e-3});
      for (int64_t step = 0; step < 3; ++step) {
        training.zero_grad();
        for (int micro = 0; micro < micros; ++micro) {
          const auto local = training.no_sync(!each && micro + 1 < micros);
          test::mean_loss(training.forward(batch(group().rank(), step, micro))).backward();
        }
        training.step();
      }
      auto& result = results.emplace_back();
      for (const auto& parameter : training.model->parameters()) result.push_back(parameter.detach().clone());
    }
    EXPECT_LT(difference(results[0], results[1]), 1e-12) << micros << " micro-batches";
  }
}

INSTANTIATE_TEST_SUITE_P(All, Strategies,
                         testing::Values("ddp", "zero1", "zero2", "megatron", "megatron_in_grads", "fsdp",
                                         "fsdp_hybrid"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace shoal::strategies_test
