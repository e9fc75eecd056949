// Communication hooks under every strategy that accepts one (DDP11, FSDP14).

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <torch/nn/module.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <set>

#include "shoal/hooks.h"
#include "shoal/join.h"
#include "tests/support/models.h"
#include "tests/support/refusal.h"
#include "tests/support/training.h"
#include "tests/support/world.h"

namespace shoal::communication_hook_test {
namespace {

using test::batch;
using test::copies;
using test::difference;
using test::group;
using test::mean_loss;
using test::Training;

const auto sgd = torch::optim::SGDOptions(0.1);

Training<test::MlpImpl> make(const std::string& strategy, std::shared_ptr<CommunicationHook> hook,
                             const Group& on = group(), std::shared_ptr<test::MlpImpl> model = nullptr) {
  return Training<test::MlpImpl>::make<torch::optim::SGD>(strategy, model ? model : test::seeded(3).ptr(), on, sgd,
                                                          {.bucket_mb = 1e-3, .hook = std::move(hook)});
}

// Each rank's gradients in the first step, divided by the number of ranks.
std::vector<std::vector<at::Tensor>> shares() {
  std::vector<std::vector<at::Tensor>> all;
  for (int rank = 0; rank < group().size(); ++rank) {
    auto model = test::seeded(3);
    mean_loss(model->forward(batch(rank, 0))).backward();
    auto& list = all.emplace_back();
    for (const auto& parameter : model->parameters()) list.push_back(parameter.grad() * (1.0 / group().size()));
  }
  return all;
}

// Gradients after a 16-bit sum: ranks are summed in order, in float32, and rounded once. Ranks that share a model are
// summed before, exactly.
std::vector<at::Tensor> after_a_step_in(at::ScalarType dtype, int sharing) {
  const auto given = shares();
  auto parameters = test::seeded(3)->parameters();
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters.size(); ++i) {
    auto sum = at::zeros(parameters[i].sizes(), at::kFloat);
    for (int first = 0; first < group().size(); first += sharing) {
      auto exact = at::zeros_like(parameters[i]);
      for (int rank = first; rank < first + sharing; ++rank) exact += given[rank][i];
      sum += exact.to(dtype).to(at::kFloat);
    }
    parameters[i] -= 0.1 * sum.to(dtype).to(at::kDouble);
  }
  return parameters;
}

class Hooks : public testing::TestWithParam<std::string> {
 protected:
  // Number of ranks that are summed before the hook.
  int sharing() const { return GetParam() == "fsdp_hybrid" && group().size() > 2 && group().size() % 2 == 0 ? 2 : 1; }
};

TEST_P(Hooks, FSDP14_compressed_sums_equal_the_naive_ones) {
  for (const auto dtype : {at::kHalf, at::kBFloat16}) {
    auto training = make(GetParam(), std::make_shared<CompressHook>(dtype));
    mean_loss(training.forward(batch(group().rank(), 0))).backward();
    training.step();
    const auto expected = after_a_step_in(dtype, sharing());
    // Gloo rounds after every addition.
    const double tolerance = group().transport() == "gloo" ? 1e-3 : 1e-14;
    EXPECT_LT(difference(copies(*training.model), expected), tolerance) << c10::toString(dtype);
    EXPECT_GT(difference(copies(*training.model), after_a_step_in(at::kDouble, sharing())), 1e-8)
        << "nothing was rounded";
  }
}

TEST_P(Hooks, DDP11_training_in_16_bits_stays_close_to_the_exact_one) {
  std::vector<std::vector<at::Tensor>> results;
  for (const bool compressed : {true, false}) {
    auto training = make(GetParam(), compressed ? std::make_shared<CompressHook>(at::kBFloat16) : nullptr);
    for (int64_t step = 0; step < 10; ++step) {
      for (int micro = 0; micro < 2; ++micro) {
        const auto local = training.no_sync(micro == 0);
        mean_loss(training.forward(batch(group().rank(), step, micro))).backward();
      }
      training.step();
      training.zero_grad();
    }
    results.push_back(copies(*training.model));
  }
  EXPECT_LT(difference(results[0], results[1]), 5e-3);
}

TEST_P(Hooks, FSDP14_the_sum_hook_gives_the_strategys_own_bits) {
  std::vector<std::vector<at::Tensor>> results;
  for (const bool hooked : {true, false}) {
    auto training = make(GetParam(), hooked ? std::make_shared<SumHook>() : nullptr);
    for (int64_t step = 0; step < 3; ++step) {
      mean_loss(training.forward(batch(group().rank(), step))).backward();
      training.step();
      training.zero_grad();
    }
    results.push_back(copies(*training.model));
  }
  if (group().transport() == "gloo") {
    EXPECT_LT(difference(results[0], results[1]), 1e-12);
    return;
  }
  for (size_t i = 0; i < results[0].size(); ++i) EXPECT_TRUE(at::equal(results[0][i], results[1][i])) << i;
}

// Bytes of bucket collectives in the second step, after buckets were rebuilt.
int64_t bucket_bytes(const std::string& strategy, std::shared_ptr<CommunicationHook> hook) {
  auto log = std::make_shared<CallLog>();
  torch::manual_seed(3);
  auto training =
      make(strategy, std::move(hook), group().recorded(log), std::make_shared<test::MlpImpl>(12, 16, 5, at::kFloat));
  int64_t bytes = 0;
  for (int64_t step = 0; step < 2; ++step) {
    log->clear();
    mean_loss(training.forward(batch(group().rank(), step).to(at::kFloat))).backward();
    bytes = 0;
    for (const auto& record : log->records()) bytes += record.label.bucket >= 0 ? record.bytes : 0;
    training.step();
    training.zero_grad();
  }
  return bytes;
}

TEST_P(Hooks, FSDP14_compression_halves_the_bytes_of_buckets) {
  if (GetParam() == "fsdp_no_shard" || GetParam() == "fsdp_hybrid") GTEST_SKIP() << "its groups are its own";
  if (group().size() == 1 && GetParam().starts_with("fsdp")) GTEST_SKIP() << "a copy within the rank comes first";
  const auto plain = bucket_bytes(GetParam(), std::make_shared<SumHook>());
  EXPECT_GT(plain, 0);
  for (const auto dtype : {at::kHalf, at::kBFloat16}) {
    EXPECT_EQ(2 * bucket_bytes(GetParam(), std::make_shared<CompressHook>(dtype)), plain);
  }
}

// Hook that records its input, and sums like the strategy.
class Observer : public SumHook {
 public:
  PendingExchange begin(const GradientBucket& bucket) override {
    at::Tensor gaps = bucket.gradients.clone();
    for (const auto& piece : bucket.pieces) {
      EXPECT_EQ(piece.in_bucket.size(), piece.in_parameter.size());
      EXPECT_EQ(piece.gradient.numel(), piece.in_bucket.size());
      EXPECT_TRUE(piece.gradient.is_alias_of(bucket.gradients));
      elements[piece.name] += piece.in_parameter.size();
      gaps.narrow(0, piece.in_bucket.begin, piece.in_bucket.size()).zero_();
    }
    EXPECT_EQ(gaps.abs().max().item<double>(), 0) << "gaps are zero";
    if (bucket.result == SumResult::ranges) {
      EXPECT_EQ(bucket.sum.numel() * bucket.group.size(), bucket.gradients.numel());
    }
    buckets.push_back(bucket.label.bucket);
    last.push_back(bucket.last);
    auto sum = SumHook::begin(bucket);
    sum.finish = [this] { ++finished; };
    return sum;
  }
  std::map<std::string, int64_t> elements;
  std::vector<int64_t> buckets;
  std::vector<bool> last;
  int finished = 0;
};

TEST_P(Hooks, FSDP14_a_users_hook_sees_every_gradient_once_and_keeps_state) {
  const auto hook = std::make_shared<Observer>();
  auto training = make(GetParam(), hook);
  constexpr int64_t steps = 3;
  for (int64_t step = 0; step < steps; ++step) {
    mean_loss(training.forward(batch(group().rank(), step))).backward();
    training.step();
    training.zero_grad();
  }
  std::map<std::string, int64_t> seen = hook->elements;
  const bool parts_only = GetParam() == "fsdp_hybrid" && group().size() > 2;
  for (const auto& entry : training.model->named_parameters()) {
    // Between hosts, a rank sums its own part only.
    if (parts_only) {
      EXPECT_LE(seen[entry.key()], steps * entry.value().numel()) << entry.key();
    } else {
      EXPECT_EQ(seen[entry.key()], steps * entry.value().numel()) << entry.key();
    }
  }
  EXPECT_GT(hook->buckets.size(), static_cast<size_t>(steps)) << "several buckets";
  EXPECT_EQ(hook->finished, static_cast<int>(hook->buckets.size()));
  if (!parts_only) {
    EXPECT_EQ(std::count(hook->last.begin(), hook->last.end(), true), steps);
  }
  EXPECT_TRUE(std::is_sorted(hook->buckets.begin(), hook->buckets.begin() + hook->buckets.size() / steps));
}

// Hook that keeps copies of what it sees of each parameter.
class Keeper : public SumHook {
 public:
  PendingExchange begin(const GradientBucket& bucket) override {
    for (const auto& piece : bucket.pieces) seen[piece.name] = piece.gradient.clone();
    return SumHook::begin(bucket);
  }
  std::map<std::string, at::Tensor> seen;
};

TEST_P(Hooks, FSDP14_a_hook_sees_the_gradients_of_parameters_that_got_other_strides) {
  if (sharing() > 1) return;  // it sees sums of two ranks
  const auto hook = std::make_shared<Keeper>();
  auto training = make(GetParam(), hook);
  for (const auto& parameter : training.model->parameters()) {
    if (parameter.dim() == 2) parameter.set_data(parameter.detach().t().contiguous().t());
  }
  mean_loss(training.forward(batch(group().rank(), 0))).backward();
  const auto expected = shares()[group().rank()];
  const auto named = training.model->named_parameters();
  for (size_t i = 0; i < expected.size(); ++i) {
    const auto& seen = hook->seen[named[i].key()];
    if (!seen.defined() || seen.sizes() != expected[i].sizes()) continue;  // a part of it
    EXPECT_LT((seen - expected[i]).abs().max().item<double>(), 1e-12) << named[i].key();
  }
}

struct ScalesImpl : torch::nn::Module {
  ScalesImpl() { weight = register_parameter("weight", at::ones({40}, at::kDouble)); }
  at::Tensor forward(const at::Tensor& x) { return (weight * x).sum(); }
  at::Tensor weight;
};

// Weights that 16 bits cannot hold: 1001, 1002, ... tokens.
TEST_P(Hooks, BEY04_weights_stay_exact_where_gradients_are_compressed) {
  auto training = Training<ScalesImpl>::make<torch::optim::SGD>(
      GetParam(), std::make_shared<ScalesImpl>(), group(), torch::optim::SGDOptions(1.0),
      {.bucket_mb = 1e-3, .hook = std::make_shared<CompressHook>(at::kBFloat16)});
  double weights = 0;
  auto sum = at::zeros({}, at::kFloat);
  for (int rank = 0; rank < group().size(); ++rank) {
    weights += 1001 + rank;
    const int other = sharing();
    if (rank % other != 0) continue;
    double exact = 0;
    for (int i = 0; i < other; ++i) exact += 256.0 * (rank + i + 1) / group().size();
    sum += at::scalar_tensor(exact, at::kDouble).to(at::kBFloat16).to(at::kFloat);
  }
  const double mean = sum.to(at::kBFloat16).item<double>() * group().size() / weights;
  training.backward(training.forward(at::full({40}, 256.0 * (group().rank() + 1), at::kDouble)), 1001 + group().rank());
  training.step();
  const double tolerance = group().transport() == "gloo" ? 1e-2 * mean : 1e-13;
  EXPECT_LT((copies(*training.model)[0] - (1 - mean)).abs().max().item<double>(), tolerance);
}

struct OptionalImpl : test::MlpImpl {
  at::Tensor forward(const at::Tensor& x, int uses) {
    auto y = torch::tanh(first(x));
    for (int i = 0; i < uses; ++i) y = torch::tanh(second(y));
    return third(y).pow(2).mean();
  }
};

TEST_P(Hooks, BEY02_with_a_hook_ranks_may_use_other_parameters_or_have_no_batch) {
  const auto uses = [](int rank, int64_t step) { return static_cast<int>((rank + step) % 3); };
  const auto batches = [](int rank) { return 3 + rank; };
  const auto make_model = [] {
    torch::manual_seed(4);
    return std::make_shared<OptionalImpl>();
  };
  auto training = Training<OptionalImpl>::make<torch::optim::SGD>(
      GetParam(), make_model(), group(), sgd,
      {.find_unused_parameters = true, .bucket_mb = 1e-3, .hook = std::make_shared<SumHook>()});
  const auto reference = make_model();
  torch::optim::SGD optimizer(reference->parameters(), sgd);
  Join join({training});
  for (int64_t step = 0; join.next(step < batches(group().rank())); ++step) {
    optimizer.zero_grad();
    for (int rank = 0; rank < group().size(); ++rank) {
      if (step >= batches(rank)) continue;
      (reference->forward(batch(rank, step), uses(rank, step)) / group().size()).backward();
    }
    optimizer.step();
    if (join.active()) {
      training.forward(batch(group().rank(), step), uses(group().rank(), step)).backward();
    } else {
      training.shadow();
    }
    training.step();
    training.zero_grad();
    ASSERT_LT(difference(copies(*training.model), reference->parameters()), 1e-12) << "step " << step;
  }
}

// Residuals are stored by parameter name, which other models have, too.
TEST_P(Hooks, FSDP14_a_hook_with_memory_serves_one_wrapper_at_a_time) {
  const auto refused = [&](const std::shared_ptr<CommunicationHook>& hook) {
    return test::refusal([&] { make(GetParam(), hook); });
  };
  const auto hook = std::make_shared<TopKHook>();
  {
    const auto training = make(GetParam(), hook);
    EXPECT_THAT(refused(hook),
                testing::AllOf(testing::HasSubstr("hook topk, fraction 0.01, error feedback true is in use"),
                               testing::HasSubstr("make one for each")));
    if (GetParam() == "ddp") {
      EXPECT_NO_THROW(make("ddp", hook, group(), training.model)) << "while the first one is replaced";
    }
  }
  EXPECT_NO_THROW(make(GetParam(), hook)) << "the first one is gone";
  const auto training = make(GetParam(), hook);
  if (GetParam() == "ddp" || GetParam() == "zero1" || GetParam() == "fsdp_no_shard") {
    EXPECT_THAT(refused(std::make_shared<PowerSgdHook>(PowerSgdOptions(), hook)), testing::HasSubstr("hook topk"))
        << "carrier";
    EXPECT_THAT(refused(std::make_shared<PostLocalSgdHook>(group(), 0, hook)), testing::HasSubstr("hook topk"))
        << "carrier";
  }
  for (const std::shared_ptr<CommunicationHook>& stateless :
       {std::shared_ptr<CommunicationHook>(std::make_shared<CompressHook>(at::kBFloat16)),
        std::shared_ptr<CommunicationHook>(std::make_shared<QuantizeHook>(QuantizeOptions{.error_feedback = false}))}) {
    const auto first = make(GetParam(), stateless);
    EXPECT_NO_THROW(make(GetParam(), stateless)) << stateless->name();
  }
}

TEST_P(Hooks, FSDP14_a_hook_that_one_rank_alone_shares_is_refused_on_all) {
  if (group().size() == 1) GTEST_SKIP() << "needs other ranks";
  const auto hook = std::make_shared<TopKHook>();
  const auto training = make(GetParam(), hook);
  const int sharing = group().size() - 1;
  const auto text =
      test::refusal([&] { make(GetParam(), group().rank() == sharing ? hook : std::make_shared<TopKHook>()); });
  EXPECT_THAT(text, testing::AllOf(testing::HasSubstr(fmt::format("rank {}: ", sharing)),
                                   testing::HasSubstr("hook topk, fraction 0.01, error feedback true is in use"),
                                   testing::HasSubstr("make one for each")));
}

INSTANTIATE_TEST_SUITE_P(Strategies, Hooks,
                         testing::Values("ddp", "zero1", "zero2", "megatron", "megatron_in_grads", "fsdp",
                                         "fsdp_grad_op", "fsdp_no_shard", "fsdp_hybrid"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace shoal::communication_hook_test
