// AccumAdam and AccumAdamW compared with decent-dp's own numbers (decent_vectors.h), with a second implementation of
// their formula, and with Adam (DEC15).

#include "shoal/optim.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/serialize.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <sstream>

#include "shoal/error.h"
#include "tests/optim/decent_vectors.h"
#include "tests/optim/inputs.h"
#include "tests/support/refusal.h"

namespace shoal::accum_adam_test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

const std::vector<std::vector<int64_t>> mixed{{3, 5}, {4}, {2, 3, 4}, {}};

AccumAdamOptions other() {
  return AccumAdamOptions(3e-2).betas({0.8, 0.95}).eps(1e-4).weight_decay(0.1).accum_iter(3);
}

double difference(const at::Tensor& a, const std::vector<double>& b) {
  return (a - at::tensor(b, at::kDouble)).abs().max().item<double>();
}

TEST(AccumAdam, DEC15_equals_decent_dps) {
  for (const auto& [dtype, tolerance] : {std::pair(at::kDouble, 1e-12), std::pair(at::kFloat, 1e-6)}) {
    const auto adam = [dtype = dtype](const auto& options) { return inputs::train<AccumAdam>(mixed, options, dtype); };
    const auto adamw = [dtype = dtype](const auto& options) {
      return inputs::train<AccumAdamW>(mixed, options, dtype);
    };
    EXPECT_LT(difference(adam(AccumAdamOptions(1e-2)), vectors::accum_adam), tolerance);
    EXPECT_LT(difference(adam(other()), vectors::accum_adam_options), tolerance);
    EXPECT_LT(difference(adamw(AccumAdamOptions(1e-2)), vectors::accum_adamw), tolerance);
    EXPECT_LT(difference(adamw(other()), vectors::accum_adamw_options), tolerance);
  }
}

// Whole history of one number: gradients are stored, and averaged when a round of accum_iter is complete. Each preview
// repeats all rounds, so that nothing is accumulated but the number itself.
double naive(double x, const std::vector<double>& gradients, const AccumAdamOptions& options, bool decoupled) {
  const auto [beta1, beta2] = options.betas();
  const auto per_round = static_cast<size_t>(options.accum_iter());
  std::vector<double> seen;  // with the decay, where it is part of them
  for (const double gradient : gradients) {
    seen.push_back(decoupled ? gradient : gradient + options.weight_decay() * x);
    if (decoupled) x -= options.lr() * options.weight_decay() * x;
    std::vector<double> rounds;  // the means of complete rounds before this step, then this step's gradient
    for (size_t begin = 0; begin + per_round < seen.size(); begin += per_round) {
      double sum = 0;
      for (size_t i = begin; i < begin + per_round; ++i) sum += seen[i];
      rounds.push_back(sum / static_cast<double>(per_round));
    }
    rounds.push_back(seen.back());
    double m = 0, v = 0;
    for (const double g : rounds) {
      m = beta1 * m + (1 - beta1) * g;
      v = beta2 * v + (1 - beta2) * g * g;
    }
    const auto count = static_cast<double>(rounds.size());
    m /= 1 - std::pow(beta1, count);
    v /= 1 - std::pow(beta2, count);
    x -= options.lr() * m / (std::sqrt(v) + options.eps());
  }
  return x;
}

// Parameter 1 has no gradient in every third step, and counts its own steps.
template <class Optimizer>
void expect_formula(const AccumAdamOptions& options, bool decoupled) {
  auto list = inputs::parameters(mixed, at::kDouble);
  Optimizer optimizer(list, options);
  std::vector<std::vector<std::vector<double>>> history;  // by parameter and element
  std::vector<std::vector<double>> start;
  for (const auto& parameter : list) {
    const auto* values = parameter.data_ptr<double>();
    start.emplace_back(values, values + parameter.numel());
    history.emplace_back(parameter.numel());
  }
  for (int step = 0; step < 11; ++step) {
    inputs::set_gradients(list, step);
    if (step % 3 == 1) list[1].mutable_grad().reset();
    for (size_t p = 0; p < list.size(); ++p) {
      const auto& gradient = list[p].grad();
      for (int64_t i = 0; gradient.defined() && i < gradient.numel(); ++i) {
        history[p][i].push_back(gradient.data_ptr<double>()[i]);
      }
    }
    const auto before = list[0].grad().clone();
    optimizer.step();
    EXPECT_TRUE(at::equal(list[0].grad(), before)) << "a step leaves gradients as they are";
  }
  for (size_t p = 0; p < list.size(); ++p) {
    for (int64_t i = 0; i < list[p].numel(); ++i) {
      EXPECT_NEAR(list[p].data_ptr<double>()[i], naive(start[p][i], history[p][i], options, decoupled), 1e-12)
          << "parameter " << p << ", element " << i << ", accum_iter " << options.accum_iter();
    }
  }
}

TEST(AccumAdam, DEC15_equals_its_formula) {
  for (const int64_t accum_iter : {1, 2, 4, 20}) {
    expect_formula<AccumAdam>(other().accum_iter(accum_iter), false);
    expect_formula<AccumAdamW>(other().accum_iter(accum_iter), true);
    expect_formula<AccumAdamW>(AccumAdamOptions().accum_iter(accum_iter), true);
  }
}

TEST(AccumAdam, DEC15_without_accumulation_it_is_adam) {
  const auto near = [](const at::Tensor& a, const at::Tensor& b) { return at::allclose(a, b, 1e-12, 1e-12); };
  EXPECT_TRUE(
      near(inputs::train<AccumAdam>(mixed, other().accum_iter(1), at::kDouble),
           inputs::train<torch::optim::Adam>(
               mixed, torch::optim::AdamOptions(3e-2).betas({0.8, 0.95}).eps(1e-4).weight_decay(0.1), at::kDouble)));
  EXPECT_TRUE(
      near(inputs::train<AccumAdamW>(mixed, other().accum_iter(1), at::kDouble),
           inputs::train<torch::optim::AdamW>(
               mixed, torch::optim::AdamWOptions(3e-2).betas({0.8, 0.95}).eps(1e-4).weight_decay(0.1), at::kDouble)));
}

TEST(AccumAdam, DEC15_saved_within_a_round_it_goes_on) {
  auto whole = inputs::parameters(mixed, at::kDouble), halves = inputs::parameters(mixed, at::kDouble);
  AccumAdamW uninterrupted(whole, other()), first(halves, other()), second(halves, AccumAdamOptions(77));
  for (int step = 0; step < 10; ++step) {
    inputs::set_gradients(whole, step);
    inputs::set_gradients(halves, step);
    if (step == 5) {
      std::stringstream file;
      torch::save(first, file);
      torch::load(second, file);
    }
    uninterrupted.step();
    (step < 5 ? first : second).step();
  }
  for (size_t i = 0; i < whole.size(); ++i) EXPECT_TRUE(at::equal(whole[i], halves[i])) << i;
}

TEST(AccumAdam, param_groups_keep_their_own_options) {
  auto list = inputs::parameters({{3}, {3}}, at::kDouble), apart = inputs::parameters({{3}, {3}}, at::kDouble);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<at::Tensor>{list[0]});
  groups.emplace_back(std::vector<at::Tensor>{list[1]}, std::make_unique<AccumAdamOptions>(other()));
  AccumAdam together(groups, AccumAdamOptions(1e-2)), first({apart[0]}, AccumAdamOptions(1e-2)),
      second({apart[1]}, other());
  for (int step = 0; step < 7; ++step) {
    inputs::set_gradients(list, step);
    inputs::set_gradients(apart, step);
    together.step();
    first.step();
    second.step();
  }
  EXPECT_TRUE(at::equal(list[0], apart[0]) && at::equal(list[1], apart[1]));
}

TEST(AccumAdam, wrong_options_and_sparse_gradients_are_refused_before_anything_changes) {
  try {
    AccumAdamW({at::ones({2})}, AccumAdamOptions(-1).betas({0.9, 1}).eps(NAN).weight_decay(-0.1).accum_iter(0));
    ADD_FAILURE() << "not refused";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("lr is -1"), HasSubstr("betas[1] is 1"), HasSubstr("eps is nan"),
                                    HasSubstr("weight_decay is -0.1"), HasSubstr("accum_iter is 0: give at least 1")));
  }
  auto good = at::ones({3}).requires_grad_(true), bad = at::ones({4, 2}).requires_grad_(true);
  good.mutable_grad() = at::ones({3});
  bad.mutable_grad() = at::ones({4, 2}).to_sparse(1);
  AccumAdam optimizer({good, bad});
  EXPECT_THROW(optimizer.step(), UsageError);
  EXPECT_TRUE(good.equal(at::ones({3})));
  EXPECT_TRUE(optimizer.state().empty());
}

TEST(AccumAdam, state_of_another_shape_is_refused_before_anything_changes) {
  auto first = at::ones({3}).requires_grad_(true), second = at::ones({4}).requires_grad_(true);
  first.mutable_grad() = at::ones({3});
  second.mutable_grad() = at::ones({4});
  AccumAdamW optimizer({first, second});
  optimizer.step();
  const auto before = first.detach().clone();
  static_cast<AccumAdamParamState&>(*optimizer.state().at(second.unsafeGetTensorImpl())).accum_grad(at::ones({2}));
  EXPECT_THAT(test::refusal([&] { optimizer.step(); }),
              HasSubstr("AccumAdamW: accum_grad of a parameter [4] has the shape [2]"));
  EXPECT_TRUE(first.equal(before));
}

}  // namespace
}  // namespace shoal::accum_adam_test
