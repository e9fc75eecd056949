// SyncBatchNorm compared with libtorch's batch norm on the concatenation of the ranks' batches.

#include "shoal/sync_batch_norm.h"

#include <torch/autograd.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "shoal/ddp.h"
#include "shoal/error.h"
#include "tests/support/models.h"
#include "tests/support/refusal.h"
#include "tests/support/world.h"

namespace shoal {
namespace {

using test::difference;
using test::group;
using test::refusal;
using torch::nn::BatchNormOptions;

constexpr int64_t channels = 3;

// Rank 1 has no sample, and all ranks have different numbers of samples.
int64_t samples(int rank) {
  return rank == 1 ? 0 : 3 + rank;
}

int64_t first_sample(int rank) {
  int64_t first = 0;
  for (int before = 0; before < rank; ++before) first += samples(before);
  return first;
}

at::Tensor of_all_ranks(const std::vector<int64_t>& further, int64_t step, at::ScalarType dtype = at::kDouble) {
  auto generator = at::detail::createCPUGenerator(77 + step);
  std::vector<int64_t> shape{first_sample(group().size()), channels};
  shape.insert(shape.end(), further.begin(), further.end());
  // The mean is large compared with the deviation: an implementation must not subtract squares.
  return at::randn(shape, generator, at::kDouble).add(20).to(dtype);
}

at::Tensor own(const at::Tensor& all) {
  return all.narrow(0, first_sample(group().rank()), samples(group().rank())).clone();
}

at::Tensor loss_sum(const at::Tensor& output, const at::Tensor& coefficients) {
  return (output * coefficients + output.pow(3)).sum();
}

// Plain batch norm of any number of dimensions, with its parameters.
struct Plain {
  explicit Plain(const BatchNormOptions& options) : norm(options) {}
  at::Tensor forward(const at::Tensor& x) {
    const auto shape = x.sizes().vec();
    return norm(x.dim() == 2 ? x : x.flatten(2)).reshape(shape);
  }
  torch::nn::BatchNorm1d norm;
};

void fill(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : module.parameters()) {
    parameter.copy_(at::linspace(0.5, 1.5, channels, at::kDouble));
  }
}

void expect_near(const at::Tensor& a, const at::Tensor& b, double tolerance, const char* what) {
  ASSERT_EQ(a.sizes(), b.sizes()) << what;
  EXPECT_LE(difference({a}, {b}), tolerance) << what;
}

// Runs three training steps, then evaluation.
void expect_equals_plain(const BatchNormOptions& options, const std::vector<int64_t>& further,
                         at::MemoryFormat format = at::MemoryFormat::Contiguous) {
  const double tolerance = 1e-12;
  Plain plain(options);
  plain.norm->to(at::kDouble);
  fill(*plain.norm);
  SyncBatchNorm norm(options, group());
  norm->to(at::kDouble);
  fill(*norm);
  std::optional<DistributedDataParallel<SyncBatchNormImpl>> parallel;
  if (options.affine()) parallel.emplace(norm, group());
  const auto total = static_cast<double>(first_sample(group().size()));
  for (int64_t step = 0; step < 3; ++step) {
    SCOPED_TRACE("step " + std::to_string(step));
    const auto coefficients = of_all_ranks(further, 100 + step);
    auto all = of_all_ranks(further, step).set_requires_grad(true);
    auto mine = own(all.detach()).contiguous(format).set_requires_grad(true);
    const auto expected = plain.forward(all);
    loss_sum(expected, coefficients).backward();
    const auto output = parallel ? parallel->forward(mine) : norm(mine);
    const auto loss = loss_sum(output, own(coefficients));
    if (parallel) {
      parallel->backward(loss, static_cast<double>(samples(group().rank())));
    } else {
      loss.backward();
    }
    expect_near(output, own(expected), tolerance, "output");
    EXPECT_TRUE(mine.numel() == 0 || output.is_contiguous(format));
    expect_near(mine.grad(), own(all.grad()), tolerance, "gradient of the input");
    for (size_t i = 0; i < norm->parameters().size(); ++i) {
      expect_near(norm->parameters()[i].grad(), plain.norm->parameters()[i].grad() / total, tolerance, "gradient");
      plain.norm->parameters()[i].mutable_grad().reset();
      norm->parameters()[i].mutable_grad().reset();
    }
    ASSERT_EQ(norm->buffers().size(), plain.norm->buffers().size());
    for (size_t i = 0; i < norm->buffers().size(); ++i) {
      expect_near(norm->buffers()[i], plain.norm->buffers()[i], tolerance, "statistics");
    }
  }
  if (!options.track_running_stats()) return;
  plain.norm->eval();
  norm->eval();
  const auto all = of_all_ranks(further, 9);
  expect_near(norm(own(all)), own(plain.forward(all)), tolerance, "evaluation");
}

TEST(SyncBatchNorm, SDP09_equals_batch_norm_on_the_concatenated_batch) {
  const BatchNormOptions usual(channels);
  for (const auto& further : std::vector<std::vector<int64_t>>{{}, {5}, {4, 3}, {2, 3, 2}}) {
    SCOPED_TRACE(std::to_string(further.size() + 2) + "-D");
    expect_equals_plain(usual, further);
    expect_equals_plain(BatchNormOptions(channels).affine(false), further);
    expect_equals_plain(BatchNormOptions(channels).momentum(std::nullopt).eps(0.1), further);
    expect_equals_plain(BatchNormOptions(channels).track_running_stats(false), further);
  }
  expect_equals_plain(usual, {4, 3}, at::MemoryFormat::ChannelsLast);
  expect_equals_plain(usual, {2, 3, 2}, at::MemoryFormat::ChannelsLast3d);
}

// 16-bit inputs are computed in float32: the difference from float64 is rounding of inputs and outputs.
TEST(SyncBatchNorm, SDP09_narrow_inputs_are_computed_in_float32) {
  if (group().size() == 1) GTEST_SKIP() << "plain batch norm";
  for (const auto& [dtype, parameters, tolerance] :
       {std::tuple(at::kFloat, at::kFloat, 1e-5), std::tuple(at::kBFloat16, at::kFloat, 1e-2),
        std::tuple(at::kBFloat16, at::kBFloat16, 1e-2), std::tuple(at::kHalf, at::kHalf, 2e-3)}) {
    SCOPED_TRACE(c10::toString(dtype));
    const auto all = of_all_ranks({4, 3}, 0, dtype);
    auto wide = all.to(at::kDouble).set_requires_grad(true);
    Plain plain(BatchNormOptions{channels});
    plain.norm->to(at::kDouble);
    const auto expected = plain.forward(wide);
    const auto coefficients = of_all_ranks({4, 3}, 100, dtype) - 20;
    (expected * coefficients.to(at::kDouble)).sum().backward();
    SyncBatchNorm norm(BatchNormOptions(channels), group());
    norm->to(parameters);
    auto mine = own(all).set_requires_grad(true);
    const auto output = norm(mine);
    EXPECT_EQ(output.scalar_type(), dtype);
    (output * own(coefficients)).sum().backward();
    expect_near(output, own(expected), tolerance, "output");
    EXPECT_EQ(mine.grad().scalar_type(), dtype);
    const double scale = wide.grad().abs().max().item<double>();
    if (mine.numel() > 0) {
      EXPECT_LE((mine.grad().to(at::kDouble) - own(wide.grad())).abs().max().item<double>(), 2 * tolerance * scale);
    }
    EXPECT_EQ(norm->weight.grad().scalar_type(), parameters);
    EXPECT_EQ(norm->running_mean.scalar_type(), parameters);
  }
}

TEST(SyncBatchNorm, SDP09_one_collective_forward_and_one_backward) {
  const auto log = std::make_shared<CallLog>();
  SyncBatchNorm norm(BatchNormOptions(channels), group().recorded(log));
  auto mine = own(of_all_ranks({4}, 0, at::kFloat)).set_requires_grad(true);
  const auto output = norm(mine);
  const int64_t calls = group().size() == 1 ? 0 : 1;
  EXPECT_EQ(log->count(Op::all_gather), calls);
  EXPECT_EQ(log->bytes(Op::all_gather), calls * group().size() * (2 * channels + 1) * 8);
  output.sum().backward();
  EXPECT_EQ(log->count(Op::all_reduce), calls);
  EXPECT_EQ(log->bytes(Op::all_reduce), calls * 2 * channels * 8);
  norm->eval();
  norm(mine);
  EXPECT_EQ(log->records().size(), static_cast<size_t>(2 * calls)) << "evaluation communicates";
}

TEST(SyncBatchNorm, SDP09_frozen_inputs_and_parameters_still_take_part) {
  SyncBatchNorm norm(BatchNormOptions(channels), group());
  norm->weight.set_requires_grad(group().rank() == 0);  // the ranks' graphs differ
  auto mine = own(of_all_ranks({4}, 0, at::kFloat)).set_requires_grad(group().rank() != 0);
  norm(mine).sum().backward();
  EXPECT_EQ(mine.grad().defined(), group().rank() != 0);
  EXPECT_TRUE(norm->bias.grad().defined());
}

// A Sequential further down.
struct BlockImpl : torch::nn::Cloneable<BlockImpl> {
  BlockImpl() { BlockImpl::reset(); }
  void reset() override {
    layers = register_module(
        "layers", torch::nn::Sequential(torch::nn::Conv1d(channels, channels, 1), torch::nn::BatchNorm1d(channels)));
  }
  at::Tensor forward(at::Tensor x) { return layers->forward(x); }
  torch::nn::Sequential layers{nullptr};
};
TORCH_MODULE(Block);

TEST(SyncBatchNorm, SDP09_converts_what_stands_in_a_sequential) {
  torch::manual_seed(1);
  torch::nn::Sequential model{Block(), torch::nn::ReLU(), torch::nn::BatchNorm1d(channels)};
  model->to(at::kDouble);
  const auto before = model->parameters();
  const auto plain = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(model->clone());
  const auto impl = model.ptr();
  model = convert_sync_batch_norm(model, group());
  EXPECT_EQ(model.ptr(), impl);
  EXPECT_EQ(convert_sync_batch_norm(model.ptr(), group()), impl);
  const auto after = model->parameters();
  ASSERT_EQ(after.size(), before.size());
  for (size_t i = 0; i < after.size(); ++i) EXPECT_TRUE(after[i].is_same(before[i])) << "an optimizer has them";
  EXPECT_TRUE(model->ptr<SyncBatchNormImpl>(2));
  const auto all = of_all_ranks({4}, 0);
  expect_near(model->forward(own(all)), own(plain->forward(all)), 1e-12, "output");
  for (size_t i = 0; i < model->buffers().size(); ++i) {
    expect_near(model->buffers()[i], plain->buffers()[i], 1e-12, "statistics");
  }
  const auto alone = convert_sync_batch_norm(torch::nn::BatchNorm2d(channels).ptr(), group());
  EXPECT_NE(alone->as<SyncBatchNormImpl>(), nullptr);
}

struct TypedImpl : torch::nn::Module {
  TypedImpl() {
    norm = register_module("norm", torch::nn::BatchNorm1d(channels));
    rest = register_module("rest", torch::nn::Sequential(torch::nn::BatchNorm1d(channels)));
  }
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Sequential rest{nullptr};
};

TEST(SyncBatchNorm, SDP09_refuses_what_it_cannot_do) {
  const auto typed = std::make_shared<TypedImpl>();
  EXPECT_NE(refusal([&] { convert_sync_batch_norm(typed, group()); }).find("norm: only elements of a Sequential"),
            std::string::npos);
  EXPECT_FALSE(typed->rest->ptr(0)->as<SyncBatchNormImpl>()) << "all or nothing";
  for (const auto& act :
       std::vector<std::function<void()>>{[&] { convert_sync_batch_norm(nullptr, group()); },
                                          [&] { convert_sync_batch_norm(torch::nn::Sequential(nullptr), group()); }}) {
    EXPECT_NE(refusal(act).find("the module is empty"), std::string::npos);
  }
  EXPECT_NE(refusal([&] {
              convert_sync_batch_norm(torch::nn::BatchNorm1d(channels), group());
            }).find("itself is a batch norm"),
            std::string::npos);
  SyncBatchNorm norm(BatchNormOptions(channels), group());
  EXPECT_NE(refusal([&] { norm(at::ones({2, 4})); }).find("[2, 4]; it must be [n, 3]"), std::string::npos);
  EXPECT_NE(refusal([&] { norm(at::ones({3})); }), "nothing was refused");
  EXPECT_NE(refusal([&] { norm(at::ones({2, 3}, at::kLong)); }).find("floating point"), std::string::npos);
  if (group().size() == 1) return;
  const auto single = at::ones({group().rank() == 0 ? 1 : 0, channels});
  EXPECT_NE(refusal([&] { norm(single); }).find("one value per channel"), std::string::npos);
  auto x = own(of_all_ranks({}, 0, at::kFloat)).set_requires_grad(true);
  const auto loss = norm(x).pow(2).sum();
  EXPECT_NE(refusal([&] {
              torch::autograd::grad({loss}, {x}, {}, true, /*create_graph=*/true);
            }).find("differentiated again"),
            std::string::npos);
}

// As in Python. libtorch's own batch norm takes such batches into its running statistics, without counting them.
TEST(SyncBatchNorm, SDP09_running_statistics_rest_while_they_are_not_tracked) {
  SyncBatchNorm norm(BatchNormOptions(channels), group());
  const auto run = [&](int64_t step) { return norm(own(of_all_ranks({4}, step, at::kFloat))); };
  run(0);
  const auto before = norm->running_var.clone();
  norm->options.track_running_stats(false);
  EXPECT_LT(run(1).abs().sum().item<double>(), 300) << "normalised by the batch";
  EXPECT_TRUE(at::equal(norm->running_var, before));
  norm->options.track_running_stats(true);
  run(2);
  EXPECT_FALSE(at::equal(norm->running_var, before));
  EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 2);
}

TEST(SyncBatchNorm, SDP09_no_samples_anywhere_changes_nothing) {
  SyncBatchNorm norm(BatchNormOptions(channels), group());
  if (group().size() == 1) GTEST_SKIP() << "plain batch norm";
  auto none = at::zeros({0, channels}).set_requires_grad(true);
  const auto output = norm(none);
  output.sum().backward();
  EXPECT_EQ(output.numel(), 0);
  EXPECT_TRUE(at::equal(norm->running_var, at::ones({channels})));
  EXPECT_TRUE(at::equal(norm->weight.grad(), at::zeros({channels})));
}

}  // namespace
}  // namespace shoal
