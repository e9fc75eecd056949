// PowerSGD (DDP11) compared with PyTorch's own hook and with a step by hand; its communication. bfloat16 compared with
// PyTorch's.

#include "shoal/hooks.h"

#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <cmath>

#include "shoal/error.h"
#include "tests/strategy/hooks/power_sgd.h"
#include "tests/support/models.h"
#include "tests/support/training.h"
#include "tests/support/world.h"

namespace shoal::power_sgd_test {
namespace {

using test::batch;
using test::difference;
using test::group;
using test::mean_loss;
using test::MlpImpl;
using test::Training;
using Hook = std::shared_ptr<CommunicationHook>;

// Noise-like values that are the same in every language; see power_sgd.py.
at::Tensor fill(at::IntArrayRef shape, double phase) {
  auto values = at::empty(shape, at::kDouble);
  auto* value = values.data_ptr<double>();
  for (int64_t i = 0; i < values.numel(); ++i) value[i] = std::cos(phase + 0.37 * static_cast<double>(i * i));
  return values;
}

std::shared_ptr<MlpImpl> model_of_the_curves() {
  auto model = std::make_shared<MlpImpl>(12, 32, 8);
  const auto parameters = model->parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const torch::NoGradGuard no_grad;
    at::Tensor(parameters[i]).copy_(0.3 * fill(parameters[i].sizes(), static_cast<double>(i)));
  }
  return model;
}

// Trains as power_sgd.py does. apart: minimum difference from the curve without a hook.
void expect_curve(const std::shared_ptr<MlpImpl>& model, const Hook& hook, const std::vector<double>& expected,
                  double apart) {
  auto training = Training<MlpImpl>::make<torch::optim::SGD>(
      "ddp", model, group(), torch::optim::SGDOptions(0.05).momentum(0.9), {.hook = hook});
  double farthest = 0;
  for (size_t step = 0; step < expected.size(); ++step) {
    const auto x = fill({16, 12}, 1.3 * static_cast<double>(step) + 0.5 * group().rank());
    const auto y = torch::tanh(x.mm(fill({12, 8}, 0.2)));
    const auto loss = (training.forward(x) - y).pow(2).mean();
    training.zero_grad();
    loss.backward();
    training.step();
    auto mean = loss.detach().clone().view({1});
    group().all_reduce(mean, ReduceOp::avg).wait();
    EXPECT_NEAR(mean.item<double>(), expected[step], 1e-6 * expected[step]) << "step " << step;
    farthest = std::max(farthest, std::abs(expected[step] / power_sgd_losses::exact[step] - 1));
  }
  EXPECT_EQ(expected.size(), 50U);
  EXPECT_GT(farthest, apart) << "the curve without compression is another one";
}

TEST(PowerSgd, DDP11_the_loss_curve_is_that_of_torchs_own_hook) {
  if (group().size() != 2) GTEST_SKIP() << "the curve is of 2 ranks";
  const auto model = model_of_the_curves();
  const auto hook = std::make_shared<PowerSgdHook>(PowerSgdOptions{.rank = 2, .start_iteration = 3});
  CommunicationHook::State start;  // what it would draw
  for (const auto& entry : model->named_parameters()) {
    if (entry.value().dim() == 2) start["factor." + entry.key()] = fill({entry.value().size(1), 2}, 0.1);
  }
  hook->load_state(start);
  expect_curve(model, hook, power_sgd_losses::rank_2, 0.1);
}

TEST(Compress, DDP11_the_loss_curve_in_bf16_is_that_of_torchs_own_hook) {
  if (group().size() != 2) GTEST_SKIP() << "the curve is of 2 ranks";
  expect_curve(model_of_the_curves(), std::make_shared<CompressHook>(at::kBFloat16), power_sgd_losses::bf16, 1e-4);
}

Training<MlpImpl> make(const std::string& strategy, Hook hook, const Group& on = group(),
                       at::ScalarType dtype = at::kDouble) {
  torch::manual_seed(3);
  return Training<MlpImpl>::make<torch::optim::SGD>(strategy, std::make_shared<MlpImpl>(12, 16, 5, dtype), on,
                                                    torch::optim::SGDOptions(0.1),
                                                    {.bucket_mb = 1e-3, .hook = std::move(hook)});
}

void train(Training<MlpImpl>& training, int64_t step) {
  training.zero_grad();
  const auto dtype = training.model->parameters().front().scalar_type();
  mean_loss(training.forward(batch(group().rank(), step).to(dtype))).backward();
  training.step();
}

Hook compressing(PowerSgdOptions options, Hook carrier = std::make_shared<SumHook>()) {
  options.min_compression_rate = 0;  // the test's matrices are small
  return std::make_shared<PowerSgdHook>(options, std::move(carrier));
}

TEST(PowerSgd, DDP11_with_full_rank_it_equals_the_plain_sum) {
  for (const auto* strategy : {"ddp", "zero1", "fsdp_no_shard"}) {
    for (const bool batched : {false, true}) {
      auto training = make(strategy, compressing({.rank = 64, .start_iteration = 0, .batched = batched}));
      auto plain = make(strategy, nullptr);
      for (int64_t step = 0; step < 10; ++step) {
        train(training, step);
        train(plain, step);
      }
      EXPECT_LT(difference(training.model->parameters(), plain.model->parameters()), 1e-9) << strategy << batched;
    }
  }
}

// Orthonormalises columns one after the other.
at::Tensor gram_schmidt(const at::Tensor& columns) {
  auto result = columns.clone();
  for (int64_t i = 0; i < result.size(1); ++i) {
    auto column = result.select(1, i);
    for (int64_t j = 0; j < i; ++j) column.sub_(result.select(1, j) * result.select(1, j).dot(column));
    column.div_(column.norm());
  }
  return result;
}

// All-gathers the ranks' tensors.
std::vector<at::Tensor> of_all_ranks(const at::Tensor& own) {
  auto all = at::empty({group().size() * own.numel()}, own.options());
  group().all_gather(all, own.contiguous().view({-1})).wait();
  std::vector<at::Tensor> list;
  for (const auto& part : all.chunk(group().size())) list.push_back(part.view(own.sizes()));
  return list;
}

TEST(PowerSgd, DDP11_a_step_equals_the_one_by_hand) {
  const auto hook = compressing({.rank = 2, .start_iteration = 0});
  auto training = make("ddp", hook);
  for (int64_t step = 0; step < 3; ++step) train(training, step);
  const auto before = hook->state();
  // All ranks' gradients of the next step.
  std::vector<std::map<std::string, at::Tensor>> gradients(group().size());
  for (int rank = 0; rank < group().size(); ++rank) {
    training.model->zero_grad();
    auto copy = std::make_shared<MlpImpl>();
    const torch::AutoGradMode grad(true);
    for (const auto& entry : training.model->named_parameters()) {
      copy->named_parameters()[entry.key()].set_data(entry.value().detach().clone());
    }
    mean_loss(copy->forward(batch(rank, 3))).backward();
    for (const auto& entry : copy->named_parameters()) gradients[rank][entry.key()] = entry.value().grad();
  }
  train(training, 3);
  const auto after = hook->state();
  for (const auto& entry : training.model->named_parameters()) {
    const auto& name = entry.key();
    const auto& grad = entry.value().grad();
    auto expected = at::zeros_like(grad);
    if (grad.dim() < 2) {
      for (int rank = 0; rank < group().size(); ++rank) expected += gradients[rank][name] / group().size();
      EXPECT_LT(difference({grad}, {expected}), 1e-12) << name;
      continue;
    }
    const auto owed = of_all_ranks(before.at("owed." + name));
    std::vector<at::Tensor> wanted;
    auto p = at::zeros({grad.size(0), 2}, at::kDouble);
    for (int rank = 0; rank < group().size(); ++rank) {
      wanted.push_back(gradients[rank][name] / group().size() + owed[rank]);
      p += wanted.back().mm(before.at("factor." + name));
    }
    p = gram_schmidt(p);
    auto q = at::zeros({grad.size(1), 2}, at::kDouble);
    for (const auto& matrix : wanted) q += matrix.t().mm(p);
    EXPECT_LT(difference({grad}, {p.mm(q.t())}), 1e-9) << name;
    const auto& own = wanted[group().rank()];
    EXPECT_LT((after.at("owed." + name) - (own - p.mm(p.t()).mm(own))).abs().max().item<double>(), 1e-12) << name;
    EXPECT_GT(after.at("owed." + name).abs().max().item<double>(), 1e-6) << name << ": nothing was left out";
    const auto& factor = after.at("factor." + name);
    auto of_rank_0 = factor.clone();
    group().broadcast(of_rank_0, 0).wait();
    EXPECT_TRUE(at::equal(factor, of_rank_0)) << name;
  }
}

// Bytes of bucket collectives in step `step`.
int64_t bucket_bytes(const Hook& hook, int64_t step) {
  auto log = std::make_shared<CallLog>();
  auto training = make("ddp", hook, group().recorded(log), at::kFloat);
  for (int64_t i = 0; i < step; ++i) train(training, i);
  log->clear();
  train(training, step);
  int64_t bytes = 0;
  for (const auto& record : log->records()) bytes += record.label.bucket >= 0 ? record.bytes : 0;
  return bytes;
}

TEST(PowerSgd, DDP11_only_factors_and_vectors_travel_in_the_carriers_dtype) {
  const int64_t vectors = 16 + 16 + 5;
  const int64_t sides = (16 + 12) + (16 + 16) + (5 + 16);
  const auto rank = [](int64_t rank) { return PowerSgdOptions{.rank = rank, .start_iteration = 2}; };
  EXPECT_EQ(bucket_bytes(compressing(rank(1)), 2), 4 * (vectors + sides));
  EXPECT_EQ(bucket_bytes(compressing(rank(3)), 2), 4 * (vectors + 3 * sides));
  EXPECT_EQ(bucket_bytes(compressing(rank(3), std::make_shared<CompressHook>(at::kBFloat16)), 2),
            2 * (vectors + 3 * sides));
  EXPECT_EQ(bucket_bytes(compressing(rank(1)), 1), bucket_bytes(std::make_shared<SumHook>(), 1)) << "before the start";
}

TEST(PowerSgd, DDP11_through_16_bits_it_stays_close_to_itself) {
  const PowerSgdOptions options{.rank = 2, .start_iteration = 1};
  auto training = make("ddp", compressing(options, std::make_shared<CompressHook>(at::kBFloat16)));
  auto plain = make("ddp", compressing(options));
  for (int64_t step = 0; step < 10; ++step) {
    train(training, step);
    train(plain, step);
  }
  const auto far = difference(training.model->parameters(), plain.model->parameters());
  EXPECT_LT(far, 2e-2);
  EXPECT_GT(far, 1e-7);
}

TEST(PowerSgd, BEY05_with_its_state_another_hook_goes_on_where_it_was) {
  const PowerSgdOptions options{.rank = 1, .start_iteration = 2};
  const auto hook = compressing(options);
  auto training = make("ddp", hook);
  for (int64_t step = 0; step < 4; ++step) train(training, step);
  CommunicationHook::State saved;
  for (const auto& [name, value] : hook->state()) saved[name] = value.clone();
  const auto resumed_hook = compressing(options);
  auto resumed = make("ddp", resumed_hook);
  const auto from = training.model->parameters();
  const auto to = resumed.model->parameters();
  for (size_t i = 0; i < from.size(); ++i) at::Tensor(to[i]).set_data(from[i].detach().clone());
  resumed_hook->load_state(saved);
  for (int64_t step = 4; step < 8; ++step) {
    train(training, step);
    train(resumed, step);
  }
  EXPECT_LT(difference(resumed.model->parameters(), training.model->parameters()), 1e-12);
  EXPECT_THROW(resumed_hook->load_state({{"owe.first.weight", at::ones({1})}}), UsageError);
}

TEST(PowerSgd, DDP11_gradients_that_are_not_finite_spoil_their_own_step_alone) {
  const auto hook = compressing({.rank = 2, .start_iteration = 0});
  auto training = make("ddp", hook);
  train(training, 0);
  training.zero_grad();
  const double spoilt = group().rank() == 0 ? INFINITY : 1;
  (mean_loss(training.forward(batch(group().rank(), 1))) * spoilt).backward();
  EXPECT_FALSE(at::isfinite(training.model->first->weight.grad()).all().item<bool>()) << "a scaler must see it";
  for (int64_t step = 2; step < 5; ++step) {
    train(training, step);
    for (const auto& parameter : training.model->parameters()) {
      EXPECT_TRUE(at::isfinite(parameter.grad()).all().item<bool>()) << "step " << step;
    }
  }
}

TEST(PowerSgd, DDP11_wrong_options_are_refused) {
  EXPECT_THROW(PowerSgdHook({.rank = 0}), UsageError);
  EXPECT_THROW(PowerSgdHook({.start_iteration = -1}), UsageError);
  EXPECT_THROW(PowerSgdHook({.min_compression_rate = -1}), UsageError);
  EXPECT_THROW(PowerSgdHook({}, nullptr), UsageError);
}

}  // namespace
}  // namespace shoal::power_sgd_test
