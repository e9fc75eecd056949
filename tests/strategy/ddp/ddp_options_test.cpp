// DistributedDataParallel: buffers, ignored parameters, subgroups, wrong options.
#include "engine/buckets/step_trailer.h"
#include "shoal/ddp.h"

#include <gmock/gmock.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <algorithm>
#include <limits>

#include "shoal/call_log.h"
#include "shoal/error.h"
#include "tests/support/models.h"
#include "tests/support/refusal.h"
#include "tests/support/world.h"

namespace shoal::ddp_options_test {
namespace {

using test::batch;
using test::difference;
using test::group;
using test::mean_loss;
using test::seeded;

struct NormImpl : torch::nn::Module {
  NormImpl() {
    linear = register_module("linear", torch::nn::Linear(12, 6));
    norm = register_module("norm", torch::nn::BatchNorm1d(6));
    to(at::kDouble);
  }
  at::Tensor forward(at::Tensor x) { return norm(linear(x)); }
  torch::nn::Linear linear{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};

TEST(DdpOptions, DDP09_buffers_follow_rank_0_in_steps_and_evaluations) {
  torch::manual_seed(3);
  auto model = std::make_shared<NormImpl>();
  torch::manual_seed(3);
  const auto alone = std::make_shared<NormImpl>();
  DistributedDataParallel parallel(model, group());
  for (int64_t step = 0; step < 3; ++step) {
    parallel.forward(batch(group().rank(), step)).pow(2).sum().backward();
    alone->forward(batch(0, step));  // rank 0's statistics come from its own batches
  }
  {
    const torch::NoGradGuard evaluation;
    static_cast<torch::nn::Module&>(*model).eval();
    parallel.forward(batch(group().rank(), 9));
  }
  const auto expected = alone->buffers();
  const auto buffers = model->buffers();
  for (size_t i = 0; i < buffers.size(); ++i) EXPECT_TRUE(at::allclose(buffers[i], expected[i])) << i;
}

TEST(DdpOptions, DDP09_is_skipped_under_no_sync_and_in_later_forwards_of_an_evaluation) {
  auto log = std::make_shared<CallLog>();
  auto model = std::make_shared<NormImpl>();
  DistributedDataParallel parallel(model, group().recorded(log));
  log->clear();
  {
    const auto local = parallel.no_sync();
    parallel.forward(batch(0, 3));
  }
  {
    const torch::NoGradGuard no_grad;
    parallel.forward(batch(0, 3));
  }
  EXPECT_EQ(log->count(Op::broadcast), 0);
  const auto output = parallel.forward(batch(0, 3));
  std::set<at::ScalarType> dtypes;
  for (const auto& buffer : model->buffers()) dtypes.insert(buffer.scalar_type());
  const auto one = static_cast<int64_t>(dtypes.size());
  EXPECT_EQ(log->count(Op::broadcast), one);
  const torch::NoGradGuard no_grad;
  parallel.forward(batch(0, 3));
  EXPECT_EQ(log->count(Op::broadcast), one) << "backward may need the buffers that forward has seen";
  {
    const at::AutoGradMode on(true);
    output.sum().backward();
  }
  for (int evaluation = 0; evaluation < 2; ++evaluation) parallel.forward(batch(0, 3));
  EXPECT_EQ(log->count(Op::broadcast), 2 * one) << "once after a step";
}

TEST(DdpOptions, DDP09_can_be_switched_off) {
  auto log = std::make_shared<CallLog>();
  auto model = std::make_shared<NormImpl>();
  DistributedDataParallel parallel(model, group().recorded(log), {.broadcast_buffers = false});
  log->clear();
  parallel.forward(batch(group().rank(), 0));
  EXPECT_EQ(log->count(Op::broadcast), 0);
}

TEST(DdpOptions, DDP15_frozen_parameters_take_no_part) {
  auto log = std::make_shared<CallLog>();
  auto model = seeded(1);
  model->first->weight.requires_grad_(false);
  model->first->bias.requires_grad_(false);
  DistributedDataParallel parallel(model, group().recorded(log));
  log->clear();
  mean_loss(parallel.forward(batch(group().rank(), 0))).backward();
  EXPECT_FALSE(model->first->weight.grad().defined());
  // Pieces begin at multiples of 16 doubles; the tail carries 4 flags, forwards and the weight.
  EXPECT_EQ(log->bytes(Op::all_reduce), (16 * 5 + 16 + 16 * 16 + 16 + StepTrailer::numel(4)) * 8);
}

TEST(DdpOptions, DDP15_a_parameter_frozen_between_micro_batches_may_be_dropped) {
  auto model = seeded(1);
  DistributedDataParallel parallel(model, group());
  const auto backward = [&](int64_t number) { mean_loss(parallel.forward(batch(group().rank(), number))).backward(); };
  const auto backward_locally = [&](int64_t number) {
    const auto local = parallel.no_sync();
    backward(number);
  };
  backward_locally(0);
  model->second->weight.requires_grad_(false);
  const auto output = parallel.forward(batch(group().rank(), 1));
  model->zero_grad();
  mean_loss(output).backward();
  backward_locally(2);
  backward(3);
  EXPECT_FALSE(model->second->weight.grad().defined());
}

TEST(DdpOptions, DDP15_a_parameter_that_is_trained_under_no_sync_alone_is_refused) {
  auto model = seeded(1);
  DistributedDataParallel parallel(model, group());
  const auto backward = [&](int64_t number) { mean_loss(parallel.forward(batch(group().rank(), number))).backward(); };
  auto& weight = model->second->weight;
  weight.requires_grad_(false);
  backward(0);
  weight.requires_grad_(true);
  {
    const auto local = parallel.no_sync();
    backward(1);
  }
  weight.requires_grad_(false);
  for (int i = 0; i < 2; ++i) {
    EXPECT_THAT(test::refusal([&] { backward(2); }),
                testing::HasSubstr("parameter second.weight was unfrozen for micro-batches"));
  }
  weight.mutable_grad().reset();
  backward(2);
  EXPECT_FALSE(weight.grad().defined());
}

struct PartlyUsedImpl : torch::nn::Module {
  PartlyUsedImpl() {
    used = register_module("used", torch::nn::Linear(12, 6));
    unused = register_module("unused", torch::nn::Linear(12, 6));
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) { return used(x); }
  torch::nn::Linear used{nullptr}, unused{nullptr};
};

TEST(DdpOptions, DDP06_a_parameter_that_is_frozen_later_hides_no_unused_one) {
  auto model = std::make_shared<PartlyUsedImpl>();
  DistributedDataParallel parallel(model, group());
  mean_loss(parallel.forward(batch(group().rank(), 0))).backward();
  model->used->bias.requires_grad_(false);
  const auto text = test::refusal([&] { parallel.forward(batch(group().rank(), 1)); });
  EXPECT_NE(text.find("no rank computed a gradient for unused.weight, unused.bias"), std::string::npos) << text;
  EXPECT_NE(text.find("In C++, a parameter whose member was assigned"), std::string::npos) << text;
  model->unused->weight.requires_grad_(false);
  model->unused->bias.requires_grad_(false);
  mean_loss(parallel.forward(batch(group().rank(), 1))).backward();
}

TEST(DdpOptions, DDP15_ignored_names_are_left_alone) {
  auto model = seeded(50 + group().rank());
  const auto own = model->second->weight.clone();
  DistributedDataParallel parallel(model, group(), {.ignored = {"second.weight"}});
  EXPECT_TRUE(at::equal(model->second->weight, own)) << "not broadcast";
  mean_loss(parallel.forward(batch(group().rank(), 0))).backward();
  for (const auto& bucket : parallel.buckets()) {
    EXPECT_EQ(std::count(bucket.begin(), bucket.end(), "second.weight"), 0);
  }
  EXPECT_THROW(DistributedDataParallel(model, group(), {.ignored = {"secnd.weight"}}), UsageError);
}

TEST(DdpOptions, DDP15_a_model_without_trainable_parameters_is_an_error) {
  auto model = seeded(1);
  for (auto& parameter : model->parameters()) parameter.requires_grad_(false);
  EXPECT_THROW(DistributedDataParallel(model, group()), UsageError);
}

TEST(DdpOptions, DDP16_runs_on_a_part_of_the_world) {
  std::vector<int> mine;
  for (int rank = group().rank() % 2; rank < group().size(); rank += 2) mine.push_back(rank);
  const auto half = group().subgroup(mine);
  auto model = seeded(1);
  auto reference = seeded(1);
  DistributedDataParallel parallel(model, half);
  mean_loss(parallel.forward(batch(group().rank(), 0))).backward();
  for (const int rank : mine) (mean_loss(reference->forward(batch(rank, 0))) / half.size()).backward();
  EXPECT_LT(difference(test::gradients(*model), test::gradients(*reference)), 1e-12);
}

TEST(DdpOptions, a_cap_that_stands_for_no_limit_makes_one_bucket) {
  for (const double cap : {1e13, std::numeric_limits<double>::max(), std::numeric_limits<double>::infinity()}) {
    auto model = seeded(1);
    DistributedDataParallel parallel(model, group(), {.bucket_cap_mb = cap, .first_bucket_mb = cap});
    EXPECT_EQ(parallel.buckets().size(), 1U) << cap;
  }
}

TEST(DdpOptions, validate_lists_all_faults) {
  const DistributedDataParallelOptions options{
      .find_unused_parameters = true, .static_graph = true, .bucket_cap_mb = 0, .first_bucket_mb = -1};
  try {
    options.validate();
    FAIL() << "no error";
  } catch (const UsageError& error) {
    const std::string text = error.what();
    for (const auto* part : {"bucket_cap_mb is 0", "first_bucket_mb is -1", "static_graph"}) {
      EXPECT_NE(text.find(part), std::string::npos) << text;
    }
  }
}

TEST(DdpOptions, DDP12_gradients_are_summed_in_a_dtype_of_their_own) {
  auto log = std::make_shared<CallLog>();
  const auto model = std::make_shared<test::MlpImpl>(12, 16, 5, at::kFloat);
  DistributedDataParallel<test::MlpImpl> parallel(
      model, group().recorded(log), {.precision = Precision::bf16_mixed(), .reduce_dtype = at::kBFloat16});
  log->clear();
  mean_loss(parallel.forward(batch(group().rank(), 0).to(at::kFloat))).backward();
  int64_t sent = 0;
  for (const auto& record : log->records()) {
    sent = std::max(sent, record.op == Op::all_reduce ? record.bytes : 0);
  }
  int64_t elements = 0;
  for (const auto& parameter : model->parameters()) {
    EXPECT_EQ(parameter.grad().scalar_type(), at::kFloat);
    EXPECT_EQ(parameter.scalar_type(), at::kFloat);
    elements += parameter.numel();
  }
  EXPECT_LT(sent, 4 * elements);
  EXPECT_GE(sent, 2 * elements);
  const auto data = parallel.logging_data();
  EXPECT_EQ(data.communication_hook, "bf16");
  const auto has = [&](const std::string& name, const std::string& value) {
    return std::count(data.settings.begin(), data.settings.end(), std::pair(name, value)) == 1;
  };
  EXPECT_TRUE(has("precision", "parameters Float, computes in BFloat16, scaler no"));
  EXPECT_TRUE(has("reduce_dtype", "BFloat16"));
  EXPECT_TRUE(has("communication_hook", "none"));
  EXPECT_TRUE(has("buffer_hook", "none"));
  EXPECT_THROW(DistributedDataParallelOptions{.reduce_dtype = at::kDouble}.validate(), UsageError);
  const DistributedDataParallelOptions both{.grad_reduce_in_fp32 = true, .reduce_dtype = at::kBFloat16};
  EXPECT_THROW(both.validate(), UsageError) << "float32, and 16 bits";
}

}  // namespace
}  // namespace shoal::ddp_options_test
