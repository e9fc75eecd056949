// Top-k, 8 bits and post-local SGD (DDP11), compared with calculations by hand.

#include <gmock/gmock.h>
#include <torch/nn/module.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "shoal/error.h"
#include "shoal/hooks.h"
#include "tests/support/models.h"
#include "tests/support/refusal.h"
#include "tests/support/training.h"
#include "tests/support/world.h"

namespace shoal::lossy_hooks_test {
namespace {

using test::batch;
using test::copies;
using test::difference;
using test::group;
using test::mean_loss;
using test::MlpImpl;
using test::Training;
using Hook = std::shared_ptr<CommunicationHook>;

const auto sgd = torch::optim::SGDOptions(0.1);

Training<MlpImpl> make(const std::string& strategy, Hook hook, const Group& on = group()) {
  return Training<MlpImpl>::make<torch::optim::SGD>(strategy, test::seeded(3).ptr(), on, sgd,
                                                    {.bucket_mb = 1e-3, .hook = std::move(hook)});
}

void train(Training<MlpImpl>& training, int64_t step) {
  training.zero_grad();
  mean_loss(training.forward(batch(group().rank(), step))).backward();
  training.step();
}

class LossyHooks : public testing::TestWithParam<std::string> {
 protected:
  // Whether the hook sees sums of several ranks, or parts of parameters.
  bool in_groups() const { return GetParam() == "fsdp_hybrid" && group().size() > 2; }
};

TEST_P(LossyHooks, DDP11_the_largest_elements_with_error_feedback_equal_those_by_hand) {
  if (in_groups()) GTEST_SKIP() << "by hand it is per parameter and rank";
  constexpr double fraction = 0.1;
  auto training = make(GetParam(), std::make_shared<TopKHook>(TopKOptions{.fraction = fraction}));
  auto model = test::seeded(3);
  const auto parameters = model->parameters();
  std::vector<std::vector<at::Tensor>> owed(group().size());
  for (int64_t step = 0; step < 4; ++step) {
    std::vector<at::Tensor> sums;
    for (const auto& parameter : parameters) sums.push_back(at::zeros_like(parameter));
    for (int rank = 0; rank < group().size(); ++rank) {
      model->zero_grad();
      mean_loss(model->forward(batch(rank, step))).backward();
      for (size_t i = 0; i < parameters.size(); ++i) {
        const auto numel = parameters[i].numel();
        if (step == 0) owed[rank].push_back(at::zeros({numel}, at::kDouble));
        auto rest = (parameters[i].grad() / group().size()).view({-1}) + owed[rank][i];
        std::vector<int64_t> order(numel);
        std::iota(order.begin(), order.end(), 0);
        const auto* value = rest.data_ptr<double>();
        std::sort(order.begin(), order.end(),
                  [&](int64_t a, int64_t b) { return std::abs(value[a]) > std::abs(value[b]); });
        for (int64_t k = 0; k < static_cast<int64_t>(std::ceil(fraction * static_cast<double>(numel))); ++k) {
          sums[i].view({-1})[order[k]] += rest[order[k]].item<double>();
          rest[order[k]] = 0;
        }
        owed[rank][i] = rest;
      }
    }
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters.size(); ++i) at::Tensor(parameters[i]).sub_(0.1 * sums[i]);
    const at::AutoGradMode grad(true);
    train(training, step);
    ASSERT_LT(difference(copies(*training.model), parameters), 1e-12) << "step " << step;
  }
}

TEST_P(LossyHooks, DDP11_all_elements_are_the_plain_sum) {
  auto training = make(GetParam(), std::make_shared<TopKHook>(TopKOptions{.fraction = 1}));
  auto plain = make(GetParam(), nullptr);
  for (int64_t step = 0; step < 5; ++step) {
    train(training, step);
    train(plain, step);
  }
  EXPECT_LT(difference(copies(*training.model), copies(*plain.model)), 1e-12);
}

struct SlopeImpl : torch::nn::Module {
  explicit SlopeImpl(int64_t numel = 1000, at::ScalarType dtype = at::kDouble) {
    weight = register_parameter("weight", at::zeros({numel}, dtype));
  }
  at::Tensor forward(const at::Tensor& x) { return (weight * x).sum(); }
  at::Tensor weight;
};

// Values of 2 bytes before positions of 4.
TEST_P(LossyHooks, DDP11_odd_numbers_of_16_bit_elements_are_summed) {
  constexpr int64_t numel = 15;
  std::vector<at::Tensor> results;
  for (const bool plain : {true, false}) {
    auto training = Training<SlopeImpl>::make<torch::optim::SGD>(
        GetParam(), std::make_shared<SlopeImpl>(numel, at::kBFloat16), group(), torch::optim::SGDOptions(1.0),
        {.hook = plain ? nullptr : std::make_shared<TopKHook>(TopKOptions{.fraction = 1})});
    for (int step = 0; step < 2; ++step) {
      training.zero_grad();
      training.forward(at::full({numel}, 1 << group().rank(), at::kBFloat16)).backward();
      training.step();
    }
    results.push_back(copies(*training.model)[0].to(at::kFloat));
  }
  EXPECT_TRUE(at::allclose(results[0], results[1], 0.02)) << results[0] << results[1];
}

// Of which each bucket is one parameter, the first and the last without elements.
struct EndsImpl : torch::nn::Module {
  EndsImpl() {
    register_parameter("none", at::zeros({0, 7}, at::kDouble));
    register_parameter("weight", at::ones({4, 3}, at::kDouble));
    register_parameter("nothing", at::zeros({7, 0}, at::kDouble));
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor sum;
    for (const auto& parameter : parameters()) sum = sum.defined() ? sum + parameter.sum() : parameter.sum();
    return x.sum() * sum;
  }
};

class CountsLast : public SumHook {
 public:
  PendingExchange begin(const GradientBucket& bucket) override {
    EXPECT_GT(bucket.gradients.numel(), 0);
    last += bucket.last ? 1 : 0;
    return SumHook::begin(bucket);
  }
  int last = 0;
};

TEST_P(LossyHooks, DDP11_buckets_without_elements_pass_no_hook) {
  const auto counts = std::make_shared<CountsLast>();
  std::vector<Hook> hooks{counts, std::make_shared<TopKHook>(TopKOptions{.fraction = 1}),
                          std::make_shared<QuantizeHook>(QuantizeOptions{.block = 3})};
  if (GetParam() == "ddp" || GetParam() == "fsdp_no_shard") {
    const PowerSgdOptions options{.rank = 3, .start_iteration = 0};
    hooks.push_back(std::make_shared<PowerSgdHook>(options, std::make_shared<QuantizeHook>()));
  }
  for (const auto& hook : hooks) {
    auto training = Training<EndsImpl>::make<torch::optim::SGD>(GetParam(), std::make_shared<EndsImpl>(), group(), sgd,
                                                                {.bucket_mb = 1e-6, .hook = hook});
    for (int step = 0; step < 2; ++step) {
      training.zero_grad();
      training.forward(at::ones({1}, at::kDouble)).backward();
      training.step();
    }
    for (const auto& value : copies(*training.model)) {
      EXPECT_TRUE(at::allclose(value, at::full_like(value, 0.8), 0, 1e-2)) << hook->name() << value;
    }
  }
  EXPECT_EQ(counts->last, 2) << "one in each step";
}

at::Tensor slope(int rank) {
  return batch(rank, 7, 0, 1, 1000).view({-1});
}

// Weight after steps with equal gradients and a rate of 1: minus their sum.
at::Tensor sum_of_steps(const std::string& strategy, const QuantizeOptions& options, int steps) {
  auto training = Training<SlopeImpl>::make<torch::optim::SGD>(strategy, std::make_shared<SlopeImpl>(), group(),
                                                               torch::optim::SGDOptions(1.0),
                                                               {.hook = std::make_shared<QuantizeHook>(options)});
  for (int step = 0; step < steps; ++step) {
    training.zero_grad();
    training.forward(slope(group().rank())).backward();
    training.step();
  }
  return -copies(*training.model)[0];
}

TEST_P(LossyHooks, DDP11_8_bits_round_to_a_block_and_error_feedback_makes_up_for_it) {
  auto mean = at::zeros({1000}, at::kDouble);
  double rounding = 0;  // at most, of the ranks' integers; a block's scale is at most that of all
  for (int rank = 0; rank < group().size(); ++rank) {
    mean += slope(rank) / group().size();
    rounding += slope(rank).abs().max().item<double>() / group().size() / 127 / 2;
  }
  const double again = mean.abs().max().item<double>() / 127;  // of their sum, where it travels too
  const auto farthest = [&](const QuantizeOptions& options, int steps) {
    return (sum_of_steps(GetParam(), options, steps) - steps * mean).abs().max().item<double>();
  };
  const auto once = farthest({.block = 64}, 1);
  EXPECT_LT(once, 1.01 * (rounding + again));
  EXPECT_GT(once, 0.01 * rounding) << "nothing was rounded";
  EXPECT_LT(farthest({.block = std::numeric_limits<int64_t>::max()}, 1), 1.01 * (rounding + again)) << "one scale";
  constexpr int steps = 20;
  EXPECT_GT(farthest({.block = 64, .error_feedback = false}, steps), 0.9 * steps * once) << "the same error each time";
  const bool twice = GetParam() == "ddp" || GetParam() == "zero1" || GetParam() == "fsdp_no_shard" || in_groups() ||
                     group().size() == 1;
  EXPECT_LT(farthest({.block = 64}, steps), 2.1 * rounding + (twice ? steps * again : 0));
}

int64_t bucket_bytes(const std::string& strategy, Hook hook) {
  auto log = std::make_shared<CallLog>();
  auto training = Training<SlopeImpl>::make<torch::optim::SGD>(strategy, std::make_shared<SlopeImpl>(1 << 14),
                                                               group().recorded(log), sgd, {.hook = std::move(hook)});
  log->clear();
  training.forward(at::ones({1 << 14}, at::kDouble)).backward();
  int64_t bytes = 0;
  for (const auto& record : log->records()) bytes += record.label.bucket >= 0 ? record.bytes : 0;
  return bytes;
}

TEST(LossyHookFormats, DDP11_the_bytes_that_travel_are_those_of_the_formats) {
  const int64_t numel = 1 << 14;
  const int64_t ranks = group().size();
  const auto top_k = std::make_shared<TopKHook>(TopKOptions{.fraction = 0.01});
  const int64_t bytes = (164 * (8 + 4) + 7) / 8 * 8;
  EXPECT_EQ(bucket_bytes("ddp", top_k), ranks * bytes) << "an all-gather, of the ranks' choices";
  const auto int8 = [] { return std::make_shared<QuantizeHook>(); };
  const auto row = [](int64_t elements) { return (elements + 255) / 256 * (256 + 4); };
  const int64_t part = (numel + ranks - 1) / ranks;
  EXPECT_EQ(bucket_bytes("ddp", int8()), 2 * ranks * row(part)) << "two rounds";
  if (ranks == 1) return;
  EXPECT_LT(bucket_bytes("megatron", int8()), 1.1 * numel + ranks * 260);
  EXPECT_LE(bucket_bytes("zero2", int8()), ranks * row(numel));
}

TEST_P(LossyHooks, DDP11_each_trains) {
  for (const Hook& hook : {Hook(std::make_shared<TopKHook>(TopKOptions{.fraction = 0.2})),
                           Hook(std::make_shared<QuantizeHook>()), Hook()}) {
    auto training = make(GetParam(), hook);
    double first = 0;
    double last = 0;
    for (int64_t step = 0; step < 40; ++step) {
      training.zero_grad();
      const auto loss = mean_loss(training.forward(batch(group().rank(), step % 4)));
      loss.backward();
      training.step();
      if (step < 4) first += loss.item<double>();
      if (step >= 36) last += loss.item<double>();
    }
    EXPECT_LT(last, 0.5 * first) << (hook ? hook->name() : "none");
  }
}

INSTANTIATE_TEST_SUITE_P(Strategies, LossyHooks,
                         testing::Values("ddp", "zero1", "zero2", "megatron", "fsdp", "fsdp_no_shard", "fsdp_hybrid"),
                         [](const auto& info) { return info.param; });

// Pairs of ranks if the number of ranks is even, else single ranks.
int local_size() {
  return group().size() % 2 == 0 && group().size() > 2 ? 2 : 1;
}

TEST(PostLocalSgd, DDP11_equals_groups_that_train_apart_and_meet) {
  constexpr int64_t start = 2;
  constexpr int64_t period = 3;
  const int size = local_size();
  std::vector<int> mine(size);
  std::iota(mine.begin(), mine.end(), group().rank() / size * size);
  auto training = make("ddp", std::make_shared<PostLocalSgdHook>(group().subgroup(mine), start));
  PeriodicModelAverager averager(group(), period, start);
  std::vector<test::Mlp> models;
  for (int first = 0; first < group().size(); first += size) models.push_back(test::seeded(3));
  int averages = 0;
  for (int64_t step = 0; step < 9; ++step) {
    for (size_t number = 0; number < models.size(); ++number) {
      const auto begin = step < start ? 0 : static_cast<int>(number) * size;
      const auto count = step < start ? group().size() : size;
      models[number]->zero_grad();
      for (int rank = begin; rank < begin + count; ++rank) {
        (mean_loss(models[number]->forward(batch(rank, step))) / count).backward();
      }
      torch::optim::SGD(models[number]->parameters(), sgd).step();
    }
    train(training, step);
    averages += averager.average(training.model->parameters()) ? 1 : 0;
    if (step >= start && (step - start) % period == 0) {  // PyTorch's rule
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < models[0]->parameters().size(); ++i) {
        auto mean = at::zeros_like(models[0]->parameters()[i]);
        for (auto& model : models) mean += model->parameters()[i] / static_cast<double>(models.size());
        for (auto& model : models) model->parameters()[i].copy_(mean);
      }
    }
    ASSERT_LT(difference(copies(*training.model), models[group().rank() / size]->parameters()), 1e-12)
        << "step " << step;
  }
  EXPECT_EQ(averages, 3);
}

// Averaged over the subgroups, the gradients are the exact weighted mean.
TEST(PostLocalSgd, BEY04_weights_hold_over_all_groups) {
  std::vector<int> mine{group().rank()};
  auto training = Training<SlopeImpl>::make<torch::optim::SGD>(
      "ddp", std::make_shared<SlopeImpl>(), group(), torch::optim::SGDOptions(1.0),
      {.hook = std::make_shared<PostLocalSgdHook>(group().subgroup(mine), 0)});
  training.backward(training.forward(slope(group().rank())), 1 + group().rank());
  training.step();
  EXPECT_TRUE(PeriodicModelAverager(group(), 1).average(training.model->parameters()));
  auto sum = at::zeros({1000}, at::kDouble);
  double weights = 0;
  for (int rank = 0; rank < group().size(); ++rank) {
    sum += slope(rank);
    weights += 1 + rank;
  }
  EXPECT_LT(difference(copies(*training.model), {-sum / weights}), 1e-12);
}

TEST(PostLocalSgd, DDP11_an_optimizer_that_updates_on_one_rank_for_all_is_refused) {
  const auto alone = std::make_shared<PostLocalSgdHook>(group().subgroup({group().rank()}), 0);
  const auto step = [](const Hook& hook) {
    auto training = make("zero1", hook);
    mean_loss(training.forward(batch(group().rank(), 0))).backward();
    training.step();
  };
  if (group().size() > 1) {
    EXPECT_THAT(test::refusal([&] { step(alone); }), testing::HasSubstr("has a PostLocalSgdHook"));
    EXPECT_THAT(test::refusal([&] { step(std::make_shared<PowerSgdHook>(PowerSgdOptions(), alone)); }),
                testing::HasSubstr("has a PostLocalSgdHook"));
  }
  EXPECT_NO_THROW(step(std::make_shared<PostLocalSgdHook>(group(), 0)));
}

// As the carrier of a hook that leaves some buckets out.
TEST(LossyHookFormats, DDP11_hooks_take_a_bucket_without_elements) {
  for (const Hook& hook : {Hook(std::make_shared<QuantizeHook>()), Hook(std::make_shared<TopKHook>()),
                           Hook(std::make_shared<CompressHook>(at::kBFloat16)), Hook(std::make_shared<SumHook>())}) {
    for (const auto result : {SumResult::all_ranks, SumResult::ranges, SumResult::owner}) {
      const auto none = at::empty({0});
      auto pending = hook->begin({.group = group(), .result = result, .owner = 0, .gradients = none, .sum = none});
      EXPECT_NO_THROW(pending.complete()) << hook->name();
      if (pending.next_stage) EXPECT_NO_THROW(pending.next_stage().complete()) << hook->name();
    }
  }
}

TEST(LossyHookFormats, DDP11_hooks_say_whether_groups_of_ranks_train_apart) {
  const auto alone = std::make_shared<PostLocalSgdHook>(group().subgroup({group().rank()}), 1);
  const bool one = group().size() == 1;
  EXPECT_EQ(alone->sums_over_all(group()), one);
  EXPECT_EQ(PowerSgdHook({}, alone).sums_over_all(group()), one);
  EXPECT_EQ(PostLocalSgdHook(group(), 1, alone).sums_over_all(group()), one);
  EXPECT_TRUE(PostLocalSgdHook(group(), 1).sums_over_all(group()));
  EXPECT_TRUE(PowerSgdHook().sums_over_all(group()));
}

TEST(LossyHookFormats, DDP11_wrong_options_are_refused) {
  EXPECT_THROW(TopKHook({.fraction = 0}), UsageError);
  EXPECT_THROW(TopKHook({.fraction = 1.5}), UsageError);
  EXPECT_THROW(QuantizeHook({.block = 0}), UsageError);
  EXPECT_THROW(PostLocalSgdHook(group(), -1), UsageError);
  EXPECT_THROW(PeriodicModelAverager(group(), 0), UsageError);
  EXPECT_THROW(make("zero2", std::make_shared<PostLocalSgdHook>(group(), 1)), UsageError);
}

}  // namespace
}  // namespace shoal::lossy_hooks_test
