// OSS, rows OSS07 to OSS10: state by name, clipping, closures, schedules, scalers and errors.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "shoal/error.h"
#include "shoal/zero.h"
#include "tests/strategy/all/mean_gradients.h"
#include "tests/support/refusal.h"

namespace shoal::test::oss_state_test {
namespace {

using torch::optim::OptimizerParamGroup;

TEST(Oss, OSS07_state_taken_at_one_number_of_ranks_goes_on_at_another) {
  const auto defaults = torch::optim::AdamWOptions(1e-2);
  auto model = seeded(1);
  auto reference = seeded(1);
  auto log = std::make_shared<CallLog>();
  OSS<torch::optim::AdamW> sharded(model->parameters(), defaults, group().recorded(log));
  torch::optim::AdamW whole(reference->parameters(), defaults);
  for (int64_t step = 0; step < 3; ++step) {
    set_mean_gradients(model, step);
    set_mean_gradients(reference, step);
    sharded.step();
    whole.step();
  }
  const auto on_last = sharded.state_dict(*model, group().size() - 1);
  EXPECT_EQ(on_last.empty(), group().rank() + 1 != group().size());
  log->clear();
  const auto state = sharded.state_dict(*model);
  EXPECT_EQ(log->count(Op::broadcast), static_cast<int64_t>(model->parameters().size())) << "one for each parameter";
  EXPECT_EQ(log->count(Op::all_gather), 2) << "what the owners have, in words";
  const auto want = optimizer_state(whole, *reference);
  ASSERT_EQ(state.size(), want.size());
  for (const auto& [name, entry] : want) {
    for (const auto& [key, tensor] : entry.tensors) EXPECT_TRUE(at::equal(state.at(name).tensors.at(key), tensor));
    EXPECT_EQ(state.at(name).numbers, entry.numbers);
  }
  // On fewer ranks, and on one rank without OSS.
  const int fewer = std::max(1, group().size() / 2);
  set_mean_gradients(reference, 3);
  whole.step();
  auto values = model->parameters();
  const auto go_on = [&](auto& optimizer, Mlp& next) {
    set_mean_gradients(next, 3);
    optimizer.step();
    EXPECT_EQ(difference(next->parameters(), reference->parameters()), 0);
  };
  const auto copy = [&] {
    auto next = seeded(1);
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < values.size(); ++i) next->parameters()[i].copy_(values[i]);
    return next;
  };
  if (group().rank() < fewer) {
    std::vector<int> ranks(fewer);
    std::iota(ranks.begin(), ranks.end(), 0);
    const auto part = group().subgroup(ranks);
    auto next = copy();
    OSS<torch::optim::AdamW> again(next->parameters(), defaults, part);
    again.load_state_dict(*next, state);
    go_on(again, next);
  }
  auto next = copy();
  torch::optim::AdamW alone(next->parameters(), defaults);
  load_optimizer_state(alone, *next, state);
  go_on(alone, next);
}

TEST(Oss, OSS07_state_that_does_not_fit_is_refused_by_name) {
  auto model = seeded(1);
  OSS<torch::optim::Adam> optimizer(model->parameters(), torch::optim::AdamOptions(1e-2), group());
  set_mean_gradients(model, 0);
  optimizer.step();
  const auto good = optimizer.state_dict(*model);
  const auto expect_refused = [&](const OptimizerState& state, const std::string& because) {
    try {
      optimizer.load_state_dict(*model, state);
      ADD_FAILURE() << because;
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find(because), std::string::npos) << error.what();
    }
  };
  auto missing = good;
  missing.erase("second.bias");
  expect_refused(missing, "second.bias");
  auto extra = good;
  extra["fourth.weight"] = {};
  expect_refused(extra, "fourth.weight");
  auto shaped = good;
  shaped.at("third.weight").tensors.at("exp_avg") = at::zeros({16, 5}, at::kDouble);
  expect_refused(shaped, "third.weight");
  optimizer.load_state_dict(*model, good);
}

// NaN equals NaN.
void expect_same(const at::Tensor& a, const at::Tensor& b, double tolerance = 1e-12) {
  EXPECT_TRUE(at::allclose(a, b, tolerance, tolerance, /*equal_nan=*/true)) << a << b;
}

void expect_clip_equals_torchs(double max_norm, double norm_type, double odd_element) {
  auto model = seeded(1);
  auto reference = seeded(1);
  OSS<torch::optim::SGD> optimizer(model->parameters(), torch::optim::SGDOptions(0.1), group());
  for (auto* of : {&model, &reference}) {
    set_mean_gradients(*of, 0);
    if (odd_element != 0) (*of)->second->weight.mutable_grad()[2][3] = odd_element;
  }
  const double norm = optimizer.clip_grad_norm(max_norm, norm_type);
  const double want = torch::nn::utils::clip_grad_norm_(reference->parameters(), max_norm, norm_type);
  expect_same(at::tensor(norm), at::tensor(want));
  // Those of other owners, too: a later backward adds to them. For norm type 0, torch computes the factor in float32.
  const auto parameters = model->parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    expect_same(parameters[i].grad(), reference->parameters()[i].grad(), norm_type == 0 ? 1e-6 : 1e-12);
  }
}

TEST(Oss, OSS09_clip_equals_the_unsharded_clip_for_every_norm) {
  constexpr auto inf = std::numeric_limits<double>::infinity();
  for (const double norm_type : {0.5, 1.0, 2.0, 3.0, 3.5, inf, 0.0, -1.0}) {
    for (const double max_norm : {0.01, 100.0}) {
      for (const double odd_element : {0.0, inf, std::nan("")}) {
        SCOPED_TRACE(testing::Message() << "norm type " << norm_type << ", at most " << max_norm << ", with "
                                        << odd_element);
        expect_clip_equals_torchs(max_norm, norm_type, odd_element);
      }
    }
  }
  expect_clip_equals_torchs(1e-9, -inf, 0);
}

TEST(Oss, OSS09_a_norm_that_is_no_number_is_refused_and_no_gradients_have_norm_0) {
  auto model = seeded(1);
  OSS<torch::optim::SGD> optimizer(model->parameters(), torch::optim::SGDOptions(0.1), group());
  for (const double norm_type : {2.0, -1.0, 0.0, std::numeric_limits<double>::infinity()}) {
    EXPECT_EQ(optimizer.clip_grad_norm(1, norm_type), 0);
  }
  EXPECT_THROW(optimizer.clip_grad_norm(1, std::nan("")), UsageError);
}

TEST(Oss, OSS10_closures_and_schedulers_reach_the_shares) {
  auto model = seeded(1);
  auto reference = seeded(1);
  OSS<torch::optim::SGD> sharded(model->parameters(), torch::optim::SGDOptions(0.1), group());
  torch::optim::SGD whole(reference->parameters(), torch::optim::SGDOptions(0.1));
  torch::optim::StepLR schedule(sharded, 1, 0.5);
  torch::optim::StepLR reference_schedule(whole, 1, 0.5);
  for (int64_t step = 0; step < 4; ++step) {
    const auto loss = sharded.step([&] {
      EXPECT_TRUE(at::GradMode::is_enabled());
      set_mean_gradients(model, step);
      return at::scalar_tensor(static_cast<double>(step));
    });
    EXPECT_EQ(loss.item<double>(), static_cast<double>(step));
    set_mean_gradients(reference, step);
    whole.step();
    schedule.step();
    reference_schedule.step();
  }
  EXPECT_EQ(difference(model->parameters(), reference->parameters()), 0);
}

TEST(Oss, OSS10_BEY07_inf_on_one_rank_only_is_skipped_by_all) {
  auto model = seeded(1);
  OSS<torch::optim::SGD> optimizer(model->parameters(), torch::optim::SGDOptions(0.1), group());
  GradScaler scaler({.initial_scale = 1024, .hysteresis = 1});
  const auto before = model->first->weight.detach().clone();
  set_mean_gradients(model, 0);
  const auto owner = optimizer.param_to_rank(model->first->weight);
  if (group().rank() == owner) model->first->weight.mutable_grad().fill_(std::numeric_limits<double>::infinity());
  EXPECT_FALSE(optimizer.step(scaler));
  EXPECT_EQ(scaler.value(), 512);
  EXPECT_TRUE(at::equal(model->first->weight, before));
  set_mean_gradients(model, 0);
  for (const auto& parameter : model->parameters()) parameter.mutable_grad().mul_(scaler.value());
  EXPECT_TRUE(optimizer.step(scaler));
  auto reference = seeded(1);
  torch::optim::SGD whole(reference->parameters(), torch::optim::SGDOptions(0.1));
  set_mean_gradients(reference, 0);
  whole.step();
  EXPECT_LT(difference(model->parameters(), reference->parameters()), 1e-12);
}

// The order of torch.amp: unscale, clip, step.
TEST(Oss, OSS10_gradients_that_are_unscaled_already_are_refused_on_all_ranks) {
  auto model = seeded(1);
  OSS<torch::optim::SGD> optimizer(model->parameters(), torch::optim::SGDOptions(0.1), group());
  GradScaler scaler({.initial_scale = 1024});
  const auto before = model->first->weight.detach().clone();
  std::vector<at::Tensor> own;
  set_mean_gradients(model, 0);
  for (const auto& parameter : model->parameters()) {
    if (optimizer.param_to_rank(parameter) == 0) own.push_back(parameter.grad());  // other ranks find none of theirs
  }
  scaler.unscale(own);
  optimizer.clip_grad_norm(0.5);
  EXPECT_THAT([&] { optimizer.step(scaler); },
              testing::ThrowsMessage<UsageError>(testing::HasSubstr("call step(scaler, max_norm) without unscale()")));
  EXPECT_TRUE(at::equal(model->first->weight, before));
  scaler.update(false);
  EXPECT_TRUE(optimizer.step(scaler));
}

// step() and clip_grad_norm() adopt changes of requires_grad before they look at gradients.
TEST(Oss, OSS05_OSS10_gradients_of_a_parameter_unfrozen_since_are_unscaled_and_clipped) {
  for (const bool scaled : {true, false}) {
    auto model = seeded(1);
    auto reference = seeded(1);
    const torch::optim::SGDOptions sgd(0.1);
    model->second->weight.requires_grad_(false);
    OSS<torch::optim::SGD> optimizer(model->parameters(), sgd, group());
    torch::optim::SGD whole(reference->parameters(), sgd);
    model->second->weight.requires_grad_(true);
    set_mean_gradients(model, 0);
    set_mean_gradients(reference, 0);
    const double norm = torch::nn::utils::clip_grad_norm_(reference->parameters(), 0.5);
    whole.step();
    if (scaled) {
      GradScaler scaler({.initial_scale = 1024});
      for (const auto& parameter : model->parameters()) parameter.mutable_grad().mul_(scaler.value());
      EXPECT_TRUE(optimizer.step(scaler, 0.5));
    } else {
      EXPECT_NEAR(optimizer.clip_grad_norm(0.5), norm, 1e-9);
      optimizer.step();
    }
    EXPECT_LT(difference(model->parameters(), reference->parameters()), 1e-12) << (scaled ? "scaled" : "unscaled");
  }
}

TEST(Oss, bad_input_is_refused) {
  auto model = seeded(1);
  const torch::optim::SGDOptions sgd(0.1);
  EXPECT_THROW((OSS<torch::optim::SGD>(model->parameters(), sgd, group(), {.broadcast_buffer_size = 0})), UsageError);
  std::vector<OptimizerParamGroup> twice;
  twice.emplace_back(model->parameters());
  twice.emplace_back(std::vector<at::Tensor>{model->first->weight});
  EXPECT_THROW((OSS<torch::optim::SGD>(twice, sgd, group())), std::exception);
  if (group().size() == 1) return;
  try {
    OSS<torch::optim::SGD> differs(model->parameters(), torch::optim::SGDOptions(0.1 * (1 + group().rank())), group());
    ADD_FAILURE() << "options that differ between ranks";
  } catch (const DisagreeError& error) {
    EXPECT_NE(std::string(error.what()).find("lr 0.1"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("lr 0.2"), std::string::npos) << error.what();
  }
}

TEST(Oss, parameters_without_memory_of_their_own_are_refused_on_all_ranks_and_the_group_goes_on) {
  const torch::optim::SGDOptions sgd(0.1);
  const bool last = group().rank() == group().size() - 1;
  const auto said = [&](const at::Tensor& parameter) {
    return refusal([&] { OSS<torch::optim::SGD>({at::ones({2}).requires_grad_(), parameter}, sgd, group()); });
  };
  EXPECT_THAT(said(at::empty({16, 4}, at::kMeta).requires_grad_()),
              testing::HasSubstr("OSS: parameter 1 [16, 4] is on the meta device"));
  const auto row = at::ones({1, 4});
  EXPECT_THAT(said((last ? row.expand({16, 4}) : row.repeat({16, 1})).requires_grad_()),
              testing::HasSubstr("parameter 1 [16, 4] has several elements in one place of memory"));
  OSS<torch::optim::SGD> taken(seeded(1)->parameters(), sgd, group());
}

}  // namespace
}  // namespace shoal::test::oss_state_test
