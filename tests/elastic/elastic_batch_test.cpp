// A global batch that stays as ranks are lost: the losses of a run with ten kills beside those of a run without.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/utils/clip_grad.h>

#include <set>

#include "tests/elastic/elastic_run.h"
#include "tests/elastic/elastic_training.h"
#include "tests/support/refusal.h"

namespace shoal::elastic_batch_test {
namespace {

constexpr int ranks = 12;
constexpr size_t share = 3;          // samples of a rank in a step
constexpr size_t samples = 17 * 12;  // five whole steps and one of two samples per rank
constexpr int epochs = 3;
constexpr int64_t steps = 6 * epochs;

// What the shares of each step were, in memory that outlives the ranks.
struct Shared {
  struct Share {
    int samples[share]{};
    int count;
    double loss;
    int rank;
  };
  Share shares[steps][ranks];
  double mean[steps];  // the running mean of a batch norm after each step

  double loss(int64_t step) const {
    double sum = 0;
    for (const auto& one : shares[step]) sum += one.loss / ranks;
    return sum;
  }
};

using Losses = test::InSharedMemory<Shared>;

// noisy: with dropout, a batch norm, whose statistics are those of a share, and a buffer that each forward changes and
// uses.
struct Model : torch::nn::Module {
  explicit Model(bool noisy) {
    torch::manual_seed(7);
    // No bias before the norm: its gradient would be rounding errors alone, which Adam scales to whole steps.
    first = register_module("first", torch::nn::Linear(torch::nn::LinearOptions(4, 16).bias(!noisy)));
    second = register_module("second", torch::nn::Linear(16, 1));
    if (!noisy) return;
    norm = register_module("norm", torch::nn::BatchNorm1d(16));
    dropout = register_module("dropout", torch::nn::Dropout(0.25));
    level = register_buffer("level", at::ones({1}));
  }
  at::Tensor forward(const at::Tensor& x) {
    auto hidden = first(x);
    if (norm) {
      level.mul_(0.9).add_(0.1 * x.abs().mean());
      hidden = dropout(norm(hidden)) * level.clone();
    }
    return second(at::tanh(hidden));
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Dropout dropout{nullptr};
  at::Tensor level;
};

enum class Compute { by_share, at_once, weighted };

struct Run {
  at::ScalarType dtype = at::kFloat;
  test::Strategy strategy{};
  bool noisy = false;
  Compute compute = Compute::by_share;
  std::string optimizer = "adam";
  bool overlap = true;  // see test::Trained
  double clip = 0;      // norm to which gradients are clipped after all shares; 0: not
  std::vector<test::Death> deaths{};
};

std::string train(const World& world, Shared& record, const Run& run) {
  alarm(60);
  const int self = world.rank();
  auto model = std::make_shared<Model>(run.noisy);
  model->to(run.dtype);
  const auto wrapped = test::wrap_as({.sharding = run.strategy.sharding,
                                      .optimizer = run.optimizer,
                                      .dtype = run.dtype,
                                      .overlap = run.overlap,
                                      .clip = run.strategy.sharding == test::Sharding::megatron ? run.clip : 0},
                                     model, world.group());
  DistributedSampler sampler(samples, world.group(), {.seed = 3});
  const auto quiet = [](const ElasticChange&) {};
  const auto made = wrapped.elastic(
      world, sampler, ElasticOptions{.keep_global_batch = ranks * static_cast<int64_t>(share), .on_change = quiet});
  auto& elastic = *made;
  const auto reached = [&](test::Moment moment) {
    for (const auto& death : run.deaths) {
      if (death.rank == self && death.moment == moment && death.step <= elastic.steps()) std::raise(SIGKILL);
    }
  };
  model->first->weight.register_hook([&](const at::Tensor&) { reached(test::Moment::in_backward); });
  for (int epoch = 0; epoch < epochs; ++epoch) {
    sampler.set_epoch(static_cast<size_t>(epoch));
    while (elastic.in_epoch()) {
      auto division = sampler;  // as a data loader has one
      division.reset();
      while (const auto batch = division.next(static_cast<size_t>(elastic.batch_size()))) {
        const auto step = elastic.steps();
        const auto x = test::inputs_of(*batch).to(run.dtype);
        const auto count = static_cast<int64_t>(batch->size() / division.slices());
        const auto note = [&](int64_t begin, const at::Tensor& losses) {
          auto& written = record.shares[step][world.rank() + begin / count * world.size()];
          written = {.count = static_cast<int>(count), .loss = losses.mean().item<double>(), .rank = self};
          for (int64_t i = 0; i < count; ++i) written.samples[i] = static_cast<int>((*batch)[begin + i]);
        };
        const auto losses_of = [&](int64_t begin, int64_t end) {
          const auto part = x.slice(0, begin, end);
          return (wrapped.forward(part).squeeze(1) - part.sum(1)).square();
        };
        const auto update = [&] {
          reached(test::Moment::before_update);
          wrapped.step();
        };
        const auto prepare = [&] {
          if (run.clip > 0) wrapped.clip(*model, run.clip);
        };
        bool complete = false;
        if (run.compute == Compute::at_once) {
          complete = elastic.step(
              x.size(0),
              [&] {
                const auto losses = losses_of(0, x.size(0));
                for (int64_t begin = 0; begin < x.size(0); begin += count)
                  note(begin, losses.detach().slice(0, begin, begin + count));
                losses.mean().backward();
                reached(test::Moment::before_commit);
              },
              update);
        } else {
          complete = elastic.step(
              x.size(0),
              [&](int64_t begin, int64_t end) {
                const auto losses = losses_of(begin, end);
                note(begin, losses.detach());
                if (run.compute == Compute::weighted) {
                  wrapped.weighted_backward(losses.sum(), static_cast<double>(count));
                } else {
                  losses.mean().backward();
                }
                reached(test::Moment::before_commit);
              },
              prepare, update);
        }
        if (!complete) break;
        if (model->norm && world.rank() == 0) record.mean[step] = model->norm->running_mean.sum().item<double>();
        wrapped.optimizer->zero_grad();
      }
    }
  }
  return elastic.steps() == steps ? "" : fmt::format("{} steps", elastic.steps());
}

// Ranks die, at three moments of their steps: every fifth of those that are left, rank 0 first.
std::vector<test::Death> deaths_of(int count) {
  const test::Moment moments[] = {test::Moment::in_backward, test::Moment::before_update, test::Moment::before_commit};
  std::vector<test::Death> deaths;
  for (int i = 0; i < count; ++i) deaths.push_back({i * 5 % ranks, moments[i % 3], 2 + i * 5 / 4});
  return deaths;
}

void train_all(const Run& run, const Losses& losses) {
  const auto ended = test::run_ranks(
      ranks, [&](const World& world) { return train(world, *losses, run); }, {}, run.strategy.options());
  size_t killed = 0;
  for (const auto& rank : ended) {
    if (WIFSIGNALED(rank.status)) {
      EXPECT_EQ(WTERMSIG(rank.status), SIGKILL);
      ++killed;
    }
    EXPECT_EQ(rank.text, "");
  }
  EXPECT_EQ(killed, run.deaths.size());
}

// Each sample of each epoch once, and shares of equal size.
void expect_every_sample_once(const Losses& losses) {
  for (int epoch = 0; epoch < epochs; ++epoch) {
    std::multiset<int> seen;
    for (int64_t step = 6 * epoch; step < 6 * (epoch + 1); ++step) {
      for (const auto& one : losses->shares[step]) seen.insert(one.samples, one.samples + one.count);
    }
    EXPECT_EQ(seen.size(), samples) << "epoch " << epoch;
    EXPECT_EQ(std::set(seen.begin(), seen.end()).size(), samples) << "epoch " << epoch;
  }
}

void compare(const Losses& disturbed, const Losses& undisturbed, double bound) {
  for (int64_t step = 0; step < steps; ++step) {
    EXPECT_NEAR(disturbed->loss(step), undisturbed->loss(step), bound * (1 + undisturbed->loss(step)))
        << "step " << step;
    EXPECT_NEAR(disturbed->mean[step], undisturbed->mean[step], bound * 10) << "step " << step;
  }
  EXPECT_LT(undisturbed->loss(steps - 2), 0.9 * undisturbed->loss(0)) << "it does not learn";
}

// Plain libtorch, one process, and the whole batch at once.
std::vector<double> losses_of_one_process(const Run& run) {
  Model model(/*noisy=*/false);
  model.to(at::kDouble);
  const auto made = test::with_optimizer({.optimizer = run.optimizer}, [&]<class Local>(Local*, const auto& options) {
    return std::unique_ptr<torch::optim::Optimizer>(std::make_unique<Local>(model.parameters(), options));
  });
  auto& optimizer = *made;
  std::vector<double> losses;
  for (int epoch = 0; epoch < epochs; ++epoch) {
    DistributedSampler order(samples, 1, 0, {.seed = 3});
    order.set_epoch(static_cast<size_t>(epoch));
    order.reset();
    while (const auto batch = order.next(ranks * share)) {
      const auto x = test::inputs_of(*batch).to(at::kDouble);
      const auto loss = (model.forward(x).squeeze(1) - x.sum(1)).square().mean();
      losses.push_back(loss.item<double>());
      optimizer.zero_grad();
      loss.backward();
      if (run.clip > 0) torch::nn::utils::clip_grad_norm_(model.parameters(), run.clip);
      optimizer.step();
    }
  }
  return losses;
}

void expect_losses_of_one_process(const Run& run) {
  const Losses disturbed, expected;
  train_all(run, disturbed);
  expect_every_sample_once(disturbed);
  // In a process of its own, because one that has run backward must not fork.
  test::run_ranks(1, [&](const World&) {
    const auto losses = losses_of_one_process(run);
    for (size_t step = 0; step < losses.size(); ++step) {
      for (auto& one : expected->shares[step]) one.loss = losses[step];
    }
    return std::string();
  });
  compare(disturbed, expected, 1e-12);
}

class ElasticKeptBatch : public ::testing::TestWithParam<test::Strategy> {};

TEST_P(ElasticKeptBatch, ELA05_ten_kills_leave_the_losses_of_an_undisturbed_run_in_float32) {
  const Losses undisturbed, disturbed;
  train_all({.strategy = GetParam(), .noisy = true}, undisturbed);
  train_all({.strategy = GetParam(), .noisy = true, .deaths = deaths_of(10)}, disturbed);
  expect_every_sample_once(undisturbed);
  expect_every_sample_once(disturbed);
  compare(disturbed, undisturbed, 1e-5);
}

// Three kills where a rank computes its shares at once, or gives them weights: each way to shard does both, over one
// transport each.
TEST_P(ElasticKeptBatch, ELA05_ten_kills_leave_the_losses_of_one_process_in_float64) {
  const auto sharding = GetParam().sharding;
  const bool even = static_cast<int>(sharding) % 2 == 0;
  std::vector<Compute> ways{Compute::by_share};
  if (sharding == test::Sharding::none || (GetParam().transport == "tcp") == even) ways.push_back(Compute::at_once);
  if (sharding == test::Sharding::none || (GetParam().transport == "tcp") != even) ways.push_back(Compute::weighted);
  for (const auto how : ways) {
    SCOPED_TRACE(static_cast<int>(how));
    const int deaths = how == Compute::by_share ? 10 : 3;
    expect_losses_of_one_process(
        {.dtype = at::kDouble, .strategy = GetParam(), .compute = how, .deaths = deaths_of(deaths)});
  }
}

// SGD and no clipping, because Adam and clipping hide a factor of the gradients.
TEST_P(ElasticKeptBatch, ELA05_sgd_and_clipping_after_all_shares_are_those_of_one_process_down_to_one_rank) {
  std::vector<std::pair<double, bool>> cases{{0, true}, {0.7, true}};  // norm, overlap
  if (GetParam().sharding == test::Sharding::megatron) cases.emplace_back(0, false);
  for (const auto& [clip, overlap] : cases) {
    SCOPED_TRACE(::testing::Message() << "clip " << clip << ", overlap " << overlap);
    expect_losses_of_one_process({.dtype = at::kDouble,
                                  .strategy = GetParam(),
                                  .optimizer = "sgd",
                                  .overlap = overlap,
                                  .clip = clip,
                                  .deaths = deaths_of(11)});
  }
}

// It would fail at the first death alone.
TEST_P(ElasticKeptBatch, ELA05_clipping_within_a_share_is_refused_before_a_rank_dies) {
  const auto sharding = GetParam().sharding;
  if (sharding == test::Sharding::none || sharding == test::Sharding::megatron) GTEST_SKIP() << "they have no call";
  const auto refused = [&](const World& world) {
    alarm(30);
    auto model = std::make_shared<Model>(/*noisy=*/false);
    const auto wrapped = test::wrap_as({.sharding = sharding}, model, world.group());
    DistributedSampler sampler(20, world.group());
    const auto elastic = wrapped.elastic(world, sampler, ElasticOptions{.keep_global_batch = 4});
    elastic->in_epoch();
    const auto compute = [&](int64_t, int64_t) {
      wrapped.forward(at::ones({2, 4})).mean().backward();
      wrapped.clip(*model, 1);
    };
    return test::refusal([&] { elastic->step(2, compute, [&] { wrapped.step(); }); });
  };
  const auto ended = test::run_ranks(2, refused, {}, GetParam().options());
  for (const auto& rank : ended) EXPECT_NE(rank.text.find("third argument of step()"), std::string::npos) << rank.text;
}

INSTANTIATE_TEST_SUITE_P(EveryStrategy, ElasticKeptBatch, ::testing::ValuesIn(test::strategies_with_shares),
                         [](const auto& info) { return info.param.name(); });

// With a forward without gradients in each share, which converts what the program has written between steps.
std::string evaluate_in_shares(const World& world, bool check_unit_order) {
  alarm(30);
  const auto model = std::make_shared<Model>(/*noisy=*/false);
  FullyShardedDataParallelOptions how;
  how.param_dtype = at::kBFloat16;
  how.check_unit_order = check_unit_order;
  FullyShardedDataParallel<Model> parallel(model, world.group(), how);
  FullyShardedOptimizer<torch::optim::SGD> optimizer(parallel, torch::optim::SGDOptions(0.01));
  DistributedSampler sampler(60, world.group());
  Elastic elastic(world, parallel, optimizer, sampler,
                  {.keep_global_batch = 6, .on_change = [](const ElasticChange&) {}});
  const int self = world.rank();
  const auto compute = [&](int64_t begin, int64_t end) {
    if (self == 2 && elastic.steps() == 1) std::raise(SIGKILL);
    const auto x = at::ones({end - begin, 4});
    {
      const torch::NoGradGuard no_grad;
      parallel.forward(x);
    }
    parallel.forward(x).mean().backward();
  };
  while (elastic.steps() < 3) {
    elastic.in_epoch();
    if (!elastic.step(elastic.batch_size(), compute, [&] { optimizer.step(); })) continue;
    optimizer.zero_grad();
    elastic.together([&] {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : model->parameters()) parameter.mul_(0.5);
      return 0;
    });
  }
  return "";
}

TEST(ElasticBatch, ELA04_ELA05_passes_without_gradients_of_unequal_shares) {
  const auto run = [](bool check_unit_order, const char* transport = "tcp") {
    return test::run_ranks(
        3,
        [&](const World& world) {
          if (!check_unit_order) return evaluate_in_shares(world, false);
          return test::refusal([&] { evaluate_in_shares(world, true); });
        },
        {}, test::Strategy{test::Sharding::fsdp, transport}.options());
  };
  for (const auto& rank : run(false)) EXPECT_EQ(rank.text, "");
  for (const auto& rank : run(true)) EXPECT_NE(rank.text.find("leave one of them out"), std::string::npos) << rank.text;
  // Where ranks share memory, nothing is gathered, and there is nothing to compare.
  const auto sharing = run(true, "auto");
  for (const int rank : {0, 1}) EXPECT_EQ(sharing[static_cast<size_t>(rank)].text, "nothing was refused");
}

}  // namespace
}  // namespace shoal::elastic_batch_test
