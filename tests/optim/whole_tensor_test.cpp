// Optimizers that need whole tensors: LAMB compared with a second implementation of its formula, Adafactor and Muon
// with PyTorch's own (vectors.h).

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <sstream>

#include "shoal/error.h"
#include "shoal/optim.h"
#include "tests/optim/inputs.h"
#include "tests/optim/vectors.h"
#include "tests/support/refusal.h"

namespace shoal::whole_tensor_test {
namespace {

using test::refusal;
using testing::AllOf;
using testing::HasSubstr;
using torch::optim::OptimizerParamGroup;

const std::vector<std::vector<int64_t>> mixed{{3, 5}, {4}, {2, 3, 4}, {}};
const std::vector<std::vector<int64_t>> matrices{{3, 5}, {6, 4}, {4, 4}};

double difference(const at::Tensor& a, const std::vector<double>& b) {
  return (a - at::tensor(b, at::kDouble)).abs().max().item<double>();
}

// LAMB as in its paper, one number at a time.
std::vector<double> naive_lamb(const LambOptions& options) {
  const auto [beta1, beta2] = options.betas();
  const auto norm = [](const std::vector<double>& x) {
    double sum = 0;
    for (const double value : x) sum += value * value;
    return std::sqrt(sum);
  };
  std::vector<double> all;
  for (size_t p = 0; p < mixed.size(); ++p) {
    const auto start = inputs::parameters(mixed, at::kDouble)[p].detach().flatten();
    const auto count = static_cast<size_t>(start.numel());
    std::vector<double> x(start.data_ptr<double>(), start.data_ptr<double>() + count), m(count), v(count), u(count);
    for (int step = 0; step < 10; ++step) {
      for (size_t i = 0; i < count; ++i) {
        const double k = static_cast<double>(i), g = std::cos(1.3 * step + 0.37 * k * k + static_cast<double>(p));
        m[i] = beta1 * m[i] + (1 - beta1) * g;
        v[i] = beta2 * v[i] + (1 - beta2) * g * g;
        const double c1 = options.bias_correction() ? 1 - std::pow(beta1, step + 1) : 1;
        const double c2 = options.bias_correction() ? 1 - std::pow(beta2, step + 1) : 1;
        u[i] = m[i] / c1 / (std::sqrt(v[i] / c2) + options.eps()) + options.weight_decay() * x[i];
      }
      const bool adapts = options.always_adapt() || options.weight_decay() != 0;
      const double ratio = adapts && norm(x) > 0 && norm(u) > 0 ? norm(x) / norm(u) : 1;
      for (size_t i = 0; i < count; ++i) x[i] -= options.lr() * ratio * u[i];
    }
    all.insert(all.end(), x.begin(), x.end());
  }
  return all;
}

TEST(Lamb, BEY12_equals_its_formula) {
  for (const auto& options : {LambOptions(0.02), LambOptions(0.02).weight_decay(0.3).betas({0.7, 0.9}).eps(1e-3),
                              LambOptions(0.02).bias_correction(false), LambOptions(0.02).weight_decay(0),
                              LambOptions(0.02).weight_decay(0).always_adapt(false)}) {
    EXPECT_LT(difference(inputs::train<Lamb>(mixed, options, at::kDouble), naive_lamb(options)), 1e-12);
    EXPECT_LT(difference(inputs::train<Lamb>(mixed, options, at::kFloat), naive_lamb(options)), 1e-6);
  }
}

TEST(Lamb, parameters_that_are_zero_leave_zero) {
  auto weight = at::zeros({3}).requires_grad_(true);
  weight.mutable_grad() = at::ones({3});
  Lamb({weight}, LambOptions(0.5)).step();
  EXPECT_TRUE(at::allclose(weight, at::full({3}, -0.5)));
}

AdafactorOptions other_adafactor() {
  return AdafactorOptions(0.3).beta2_decay(-0.6).eps1(0.6).eps2(0.9).d(1.5).weight_decay(0.1);
}

TEST(Adafactor, BEY12_equals_pythons) {
  const auto own = inputs::train<Adafactor, AdafactorOptions>;
  EXPECT_LT(difference(own(mixed, {}, at::kDouble), vectors::adafactor), 1e-12);
  EXPECT_LT(difference(own(mixed, other_adafactor(), at::kDouble), vectors::adafactor_options), 1e-12);
  EXPECT_LT(difference(own(mixed, other_adafactor(), at::kFloat), vectors::adafactor_options), 1e-6);
  // Otherwise the machine epsilon, which differs between the two dtypes, would matter.
  EXPECT_LT(difference(own(mixed, {}, at::kFloat), vectors::adafactor), 1e-6);
}

// After one step the average is (1 - beta1) of the update; after many it lags.
TEST(Adafactor, first_moment_averages_steps) {
  const double beta1 = 0.75;
  auto plain = inputs::parameters(mixed, at::kDouble), averaged = inputs::parameters(mixed, at::kDouble);
  Adafactor without(plain, AdafactorOptions(0.1)), with(averaged, AdafactorOptions(0.1).beta1(beta1));
  std::vector<at::Tensor> average(plain.size());
  for (int step = 0; step < 4; ++step) {
    inputs::set_gradients(plain, step);
    inputs::set_gradients(averaged, step);
    std::vector<at::Tensor> before;
    {
      // The same point, so that both compute the same step.
      const at::NoGradGuard no_grad;
      for (size_t i = 0; i < plain.size(); ++i) before.push_back(plain[i].copy_(averaged[i]).clone());
    }
    without.step();
    with.step();
    for (size_t i = 0; i < plain.size(); ++i) {
      const auto change = (plain[i] - before[i]).detach() * (1 - beta1);
      average[i] = average[i].defined() ? average[i] * beta1 + change : change;
      EXPECT_TRUE(at::allclose(averaged[i], before[i] + average[i], 1e-12, 1e-12)) << "step " << step << ", " << i;
    }
  }
}

TEST(Adafactor, keeps_rows_and_columns_only) {
  auto weight = at::ones({2, 30, 40}).requires_grad_(true);
  weight.mutable_grad() = at::ones_like(weight);
  Adafactor optimizer({weight});
  optimizer.step();
  const auto& state = static_cast<AdafactorParamState&>(*optimizer.state().at(weight.unsafeGetTensorImpl()));
  EXPECT_EQ(state.row_var().sizes(), (at::IntArrayRef{2, 30, 1}));
  EXPECT_EQ(state.col_var().sizes(), (at::IntArrayRef{2, 1, 40}));
  EXPECT_FALSE(state.variance().defined() || state.exp_avg().defined());
}

TEST(Adafactor, beta1_is_refused_over_state_without_it_before_anything_changes) {
  auto weight = at::ones({2, 3}).requires_grad_(true);
  weight.mutable_grad() = at::ones({2, 3});
  Adafactor optimizer({weight}, AdafactorOptions(0.1));
  optimizer.step();
  auto& options = static_cast<AdafactorOptions&>(optimizer.param_groups()[0].options());
  options.beta1(0.9);
  const auto& state = static_cast<AdafactorParamState&>(*optimizer.state().at(weight.unsafeGetTensorImpl()));
  weight.mutable_grad() = at::full({2, 3}, 5.0F);
  const auto before = weight.detach().clone(), rows = state.row_var().clone();
  EXPECT_THAT(refusal([&] { optimizer.step(); }), HasSubstr("set beta1 to 0, or begin with new state"));
  EXPECT_EQ(state.step(), 1);
  EXPECT_TRUE(weight.equal(before) && state.row_var().equal(rows));
  options.beta1(0);
  optimizer.step();
  EXPECT_FALSE(weight.equal(before));
}

MuonOptions other_muon() {
  return MuonOptions(2e-3)
      .weight_decay(0.3)
      .momentum(0.8)
      .nesterov(false)
      .ns_coefficients({3.0, -4.0, 2.0})
      .ns_steps(4)
      .adjust_lr(MuonRate::match_rms_adamw);
}

// The iteration runs in bfloat16, whose products processors round differently: the tolerance is a hundredth of each of
// the ten steps, which are at most 1.5 times the rate per element.
TEST(Muon, BEY12_equals_pythons) {
  const auto own = inputs::train<Muon, MuonOptions>;
  for (const auto dtype : {at::kDouble, at::kFloat}) {
    EXPECT_LT(difference(own(matrices, MuonOptions(1e-2), dtype), vectors::muon), 10 * 1.5e-2 * 0.01);
    EXPECT_LT(difference(own(matrices, other_muon(), dtype), vectors::muon_options), 10 * 1.5 * 1e-3 * 0.01);
  }
}

TEST(Muon, steps_are_nearly_orthogonal) {
  for (const auto& shape : {std::vector<int64_t>{8, 20}, std::vector<int64_t>{20, 8}}) {
    torch::manual_seed(1);
    auto weight = at::zeros(shape).requires_grad_(true);
    weight.mutable_grad() = at::randn(shape);
    Muon({weight}, MuonOptions(1)).step();
    const auto values = at::linalg_svdvals(weight.detach()) / std::sqrt(std::max(1.0, shape[0] / 1.0 / shape[1]));
    EXPECT_GT(values.min().item<double>(), 0.6);
    EXPECT_LT(values.max().item<double>(), 1.3);
  }
}

TEST(Muon, refuses_all_but_matrices_by_index_and_shape) {
  const auto matrix = at::ones({2, 2}), cube = at::ones({2, 3, 4});
  EXPECT_THAT(refusal([&] { Muon({matrix, cube}); }), AllOf(HasSubstr("parameter 1"), HasSubstr("[2, 3, 4]")));
  Muon muon({matrix});
  EXPECT_THAT(refusal([&] { muon.add_param_group(OptimizerParamGroup({at::ones(3)})); }), HasSubstr("[3]"));
  EXPECT_EQ(muon.param_groups().size(), 1);
  muon.param_groups()[0].params().push_back(at::ones(5));
  EXPECT_THAT(refusal([&] { muon.step(); }), AllOf(HasSubstr("parameter 1"), HasSubstr("[5]")));
}

TEST(WholeTensorOptimizers, wrong_options_are_refused) {
  const auto weight = at::ones({2, 2});
  const double nan = std::nan("");
  for (const auto& wrong : {LambOptions(-1), LambOptions(nan), LambOptions().betas({1, 0.9}),
                            LambOptions().betas({0.9, -0.1}), LambOptions().eps(-1), LambOptions().weight_decay(-1)}) {
    EXPECT_THROW(Lamb({weight}, wrong), UsageError);
  }
  for (const auto& wrong : {AdafactorOptions(-1), AdafactorOptions().beta2_decay(0.1), AdafactorOptions().eps1(-1),
                            AdafactorOptions().eps2(-1), AdafactorOptions().d(0.5), AdafactorOptions().weight_decay(-1),
                            AdafactorOptions().beta1(1)}) {
    EXPECT_THROW(Adafactor({weight}, wrong), UsageError);
  }
  for (const auto& wrong : {MuonOptions(-1), MuonOptions().weight_decay(-1), MuonOptions().momentum(-1),
                            MuonOptions().eps(-1), MuonOptions().ns_steps(100)}) {
    EXPECT_THROW(Muon({weight}, wrong), UsageError);
  }
  EXPECT_THAT(refusal([&] { Lamb({weight}, LambOptions(-2).eps(-1)); }),
              AllOf(HasSubstr("lr is -2"), HasSubstr("eps")));
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<at::Tensor>{weight}, std::make_unique<LambOptions>(-3));
  EXPECT_THAT(refusal([&] { Lamb lamb(groups); }), HasSubstr("lr is -3"));
}

template <class Optimizer, class Options>
void expect_sparse_refused(const Options& options) {
  auto good = at::ones({2, 2}).requires_grad_(true), bad = at::ones({2, 2}).requires_grad_(true);
  good.mutable_grad() = at::ones({2, 2});
  bad.mutable_grad() = at::ones({2, 2}).to_sparse(1);
  Optimizer optimizer({good, bad}, options);
  EXPECT_THAT(refusal([&] { optimizer.step(); }), HasSubstr("sparse"));
  EXPECT_TRUE(good.equal(at::ones({2, 2})) && optimizer.state().empty());
}

TEST(WholeTensorOptimizers, sparse_gradients_are_refused_before_anything_changes) {
  expect_sparse_refused<Lamb>(LambOptions());
  expect_sparse_refused<Adafactor>(AdafactorOptions());
  expect_sparse_refused<Muon>(MuonOptions());
}

// field: of the state; the second parameter's gets another shape, and the first parameter would be updated before it.
template <class Optimizer, class State, class Field>
void expect_other_shape_refused(const char* name, const Field& field) {
  auto first = at::ones({2, 3}).requires_grad_(true), second = at::ones({2, 3}).requires_grad_(true);
  first.mutable_grad() = at::ones({2, 3});
  second.mutable_grad() = at::ones({2, 3});
  Optimizer optimizer({first, second});
  optimizer.step();
  const auto before = first.detach().clone();
  for (const auto& other : {at::ones({3, 2}), at::Tensor()}) {
    field(static_cast<State&>(*optimizer.state().at(second.unsafeGetTensorImpl()))) = other;
    EXPECT_THAT(refusal([&] { optimizer.step(); }), AllOf(HasSubstr(name), HasSubstr("was loaded from another model")));
    EXPECT_TRUE(first.equal(before)) << name;
  }
}

TEST(WholeTensorOptimizers, state_of_another_shape_is_refused_before_anything_changes) {
  expect_other_shape_refused<Lamb, LambParamState>(
      "exp_avg", [](auto& state) -> auto& { return state.exp_avg(); });
  expect_other_shape_refused<Lamb, LambParamState>(
      "exp_avg_sq", [](auto& state) -> auto& { return state.exp_avg_sq(); });
  expect_other_shape_refused<Adafactor, AdafactorParamState>(
      "row_var", [](auto& state) -> auto& { return state.row_var(); });
  expect_other_shape_refused<Adafactor, AdafactorParamState>(
      "col_var", [](auto& state) -> auto& { return state.col_var(); });
  expect_other_shape_refused<Muon, MuonParamState>(
      "momentum_buffer", [](auto& state) -> auto& { return state.momentum_buffer(); });
}

TEST(WholeTensorOptimizers, BEY01_parameters_without_elements_and_without_gradients) {
  auto none = at::ones({0, 3}).requires_grad_(true), unused = at::ones({2, 2}).requires_grad_(true);
  none.mutable_grad() = at::ones({0, 3});
  Lamb({none, unused}).step();
  Adafactor({none, unused}).step();
  Muon({none, unused}).step();
  EXPECT_TRUE(unused.equal(at::ones({2, 2})));
}

// Options of groups and changed rates apply, however a group was added.
TEST(WholeTensorOptimizers, OSS01_groups_keep_their_own_options) {
  std::vector<at::Tensor> weights;
  for (int i = 0; i < 3; ++i) weights.push_back(at::ones({1, 1}).requires_grad_(true));
  const auto with_rate = [&](int i, double lr) {
    return OptimizerParamGroup({weights[i]}, std::make_unique<LambOptions>(LambOptions(lr).weight_decay(0)));
  };
  Lamb optimizer({with_rate(0, 0.25), OptimizerParamGroup({weights[1]})}, LambOptions(0.5).weight_decay(0));
  optimizer.add_param_group(with_rate(2, 0.125));
  for (auto& weight : weights) weight.mutable_grad() = at::ones({1, 1});
  optimizer.step();
  EXPECT_NEAR(weights[0].item<double>(), 0.75, 1e-6);
  EXPECT_NEAR(weights[1].item<double>(), 0.5, 1e-6);
  EXPECT_NEAR(weights[2].item<double>(), 0.875, 1e-6);
  optimizer.param_groups()[1].options().set_lr(0);
  EXPECT_EQ(optimizer.param_groups()[1].options().get_lr(), 0);
  optimizer.step();
  EXPECT_NEAR(weights[1].item<double>(), 0.5, 1e-6);
}

template <class Optimizer, class Options>
void save_and_go_on(const Options& options) {
  auto whole = inputs::parameters(matrices, at::kDouble), half = inputs::parameters(matrices, at::kDouble);
  Optimizer uninterrupted(whole, options), before(half, options), after(half, Options(9));
  for (int step = 0; step < 6; ++step) {
    if (step == 3) {
      std::stringstream file;
      torch::save(before, file);
      torch::load(after, file);
    }
    inputs::set_gradients(whole, step);
    inputs::set_gradients(half, step);
    uninterrupted.step();
    if (step < 3) {
      before.step();
    } else {
      after.step();
    }
  }
  for (size_t i = 0; i < whole.size(); ++i) EXPECT_TRUE(whole[i].equal(half[i])) << i;
}

TEST(WholeTensorOptimizers, saved_state_and_options_go_on) {
  save_and_go_on<Lamb>(LambOptions(0.1).betas({0.8, 0.9}).bias_correction(false).eps(0.1).weight_decay(0.2));
  save_and_go_on<Lamb>(LambOptions(0.1).weight_decay(0).always_adapt(false));
  save_and_go_on<Adafactor>(other_adafactor());
  save_and_go_on<Adafactor>(AdafactorOptions(0.1).beta1(0.9));
  save_and_go_on<Muon>(MuonOptions(0.1));
  save_and_go_on<Muon>(other_muon().eps(0.5));
}

}  // namespace
}  // namespace shoal::whole_tensor_test
