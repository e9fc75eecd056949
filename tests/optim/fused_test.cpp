// Fused optimizers compared with libtorch's own, over many steps.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/serialize.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <sstream>

#include "shoal/error.h"
#include "shoal/optim.h"
#include "tests/support/refusal.h"

namespace shoal::fused_test {
namespace {

using namespace torch::optim;

std::vector<at::Tensor> parameters(at::ScalarType dtype) {
  torch::manual_seed(3);
  std::vector<at::Tensor> list{at::randn({5, 7}), at::randn({}),    at::randn({2, 3, 4, 4}),
                               at::randn({9}),    at::randn({130}), at::randn({0, 3})};
  list[2] = list[2].contiguous(at::MemoryFormat::ChannelsLast);
  for (auto& tensor : list) tensor = tensor.to(dtype).requires_grad_(true);
  return list;
}

void set_gradients(std::vector<at::Tensor>& list, int step) {
  torch::manual_seed(100 + step);
  for (size_t i = 0; i < list.size(); ++i) {
    // One parameter has no gradient in some steps; another's gradient has another layout.
    list[i].mutable_grad() = i == 3 && step % 3 == 0 ? at::Tensor() : at::randn_like(list[i], at::kFloat).to(list[i]);
    if (i == 2 && step % 2 == 0) list[i].mutable_grad() = list[i].grad().contiguous();
  }
}

template <class Fused, class Plain, class Options>
void compare(const Options& options, at::ScalarType dtype, double tolerance, int steps = 20) {
  auto own = parameters(dtype);
  auto reference = parameters(dtype);
  Fused fused(own, options);
  Plain plain(reference, options);
  for (int step = 0; step < steps; ++step) {
    set_gradients(own, step);
    set_gradients(reference, step);
    fused.step();
    plain.step();
    for (size_t i = 0; i < own.size(); ++i) {
      ASSERT_TRUE(at::allclose(own[i], reference[i], tolerance, tolerance)) << "step " << step << ", parameter " << i;
    }
  }
}

TEST(FusedAdamW, equals_libtorchs_adam_w) {
  compare<FusedAdamW, AdamW>(AdamWOptions(1e-2).weight_decay(0.1), at::kDouble, 1e-12);
  compare<FusedAdamW, AdamW>(AdamWOptions(1e-2).weight_decay(0.1), at::kFloat, 2e-5);
  compare<FusedAdamW, AdamW>(AdamWOptions(3e-2).betas({0.8, 0.95}).eps(1e-6), at::kDouble, 1e-12);
  compare<FusedAdamW, AdamW>(AdamWOptions(1e-2).amsgrad(true), at::kDouble, 1e-12);
}

TEST(FusedAdam, equals_libtorchs_adam) {
  compare<FusedAdam, Adam>(AdamOptions(1e-2).weight_decay(0.1), at::kDouble, 1e-12);
  compare<FusedAdam, Adam>(AdamOptions(1e-2).weight_decay(0.1), at::kFloat, 2e-5);
  compare<FusedAdam, Adam>(AdamOptions(3e-2).betas({0.8, 0.95}).eps(1e-6), at::kDouble, 1e-12);
  compare<FusedAdam, Adam>(AdamOptions(1e-2).amsgrad(true), at::kDouble, 1e-12);
}

TEST(FusedSGD, equals_libtorchs_sgd) {
  for (const auto& [dtype, tolerance] : {std::pair(at::kDouble, 1e-12), std::pair(at::kFloat, 2e-5)}) {
    compare<FusedSGD, SGD>(SGDOptions(0.1), dtype, tolerance);
    compare<FusedSGD, SGD>(SGDOptions(0.1).weight_decay(0.1), dtype, tolerance);
    compare<FusedSGD, SGD>(SGDOptions(0.1).momentum(0.9).dampening(0.2).weight_decay(0.1), dtype, tolerance);
    compare<FusedSGD, SGD>(SGDOptions(0.1).momentum(0.9).nesterov(true), dtype, tolerance);
  }
}

// libtorch's Module::parameters() lists a submodule's parameters under each of its names, and its optimizers update
// them each time. A new momentum has no values before the first of these updates.
template <class Fused, class Plain, class Options>
void expect_each_update(const Options& options) {
  auto own = parameters(at::kDouble), reference = parameters(at::kDouble);
  const auto twice = [](std::vector<at::Tensor> list) {
    list.insert(list.end(), {list[0], list[1], list[0]});
    return list;
  };
  Fused fused(twice(own), options);
  Plain plain(twice(reference), options);
  for (int step = 0; step < 4; ++step) {
    set_gradients(own, step);
    set_gradients(reference, step);
    fused.step();
    plain.step();
    for (size_t i = 0; i < own.size(); ++i) {
      ASSERT_TRUE(at::allclose(own[i], reference[i], 1e-12, 1e-12)) << "step " << step << ", parameter " << i;
    }
  }
}

TEST(Fused, a_parameter_that_is_listed_again_is_updated_again) {
  expect_each_update<FusedSGD, SGD>(SGDOptions(0.1));
  expect_each_update<FusedSGD, SGD>(SGDOptions(0.1).momentum(0.9).dampening(0.2).weight_decay(0.1));
  expect_each_update<FusedSGD, SGD>(SGDOptions(0.1).momentum(0.9).nesterov(true));
  expect_each_update<FusedAdam, Adam>(AdamOptions(1e-2).weight_decay(0.1));
  expect_each_update<FusedAdamW, AdamW>(AdamWOptions(1e-2));
  expect_each_update<FusedAdagrad, Adagrad>(AdagradOptions(0.1).lr_decay(0.05));
}

// libtorch's kernel does not store 16-bit parameters on the CPU.
TEST(FusedSGD, trains_sixteen_bit_parameters) {
  for (const auto& [dtype, tolerance] : {std::pair(at::kBFloat16, 3e-2), std::pair(at::kHalf, 4e-3)}) {
    compare<FusedSGD, SGD>(SGDOptions(0.1).weight_decay(0.1), dtype, tolerance, 6);
    compare<FusedSGD, SGD>(SGDOptions(0.1).momentum(0.9).dampening(0.2), dtype, tolerance, 6);
    compare<FusedSGD, SGD>(SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.1), dtype, tolerance, 6);
  }
}

TEST(FusedAdagrad, equals_libtorchs_adagrad) {
  for (const auto& [dtype, tolerance] : {std::pair(at::kDouble, 1e-12), std::pair(at::kFloat, 2e-5)}) {
    compare<FusedAdagrad, Adagrad>(AdagradOptions(0.1), dtype, tolerance);
    compare<FusedAdagrad, Adagrad>(AdagradOptions(0.1).lr_decay(0.05).weight_decay(0.1), dtype, tolerance);
    compare<FusedAdagrad, Adagrad>(AdagradOptions(0.1).initial_accumulator_value(0.3).eps(1e-4), dtype, tolerance);
  }
}

TEST(FusedAdagrad, trains_parameters_added_later) {
  auto first = at::ones({3}).requires_grad_(true), second = at::ones({4}).requires_grad_(true);
  FusedAdagrad optimizer({first}, AdagradOptions(0.5).initial_accumulator_value(3));
  optimizer.add_param_group(OptimizerParamGroup({second}));
  first.mutable_grad() = at::ones({3});
  second.mutable_grad() = at::ones({4});
  optimizer.step();
  EXPECT_TRUE(at::allclose(first, at::full({3}, 0.75)));  // 1 - 0.5 / sqrt(3 + 1)
  EXPECT_TRUE(at::allclose(second, at::full({4}, 0.75)));
}

// State saved by the fused optimizer is valid for libtorch's, and vice versa.
template <class Fused, class Plain, class Options>
void swap_halfway(const Options& options) {
  auto own = parameters(at::kDouble), reference = parameters(at::kDouble);
  Fused fused(own, options);
  Plain plain(reference, options), then(own, Options(77));
  for (int step = 0; step < 6; ++step) {
    if (step == 3) {
      std::stringstream file;
      torch::save(fused, file);
      torch::load(then, file);
    }
    set_gradients(own, step);
    set_gradients(reference, step);
    plain.step();
    if (step < 3) {
      fused.step();
    } else {
      then.step();
    }
  }
  for (size_t i = 0; i < own.size(); ++i) EXPECT_TRUE(at::allclose(own[i], reference[i], 1e-12, 1e-12)) << i;
}

TEST(Fused, state_goes_on_in_libtorchs_optimizer) {
  swap_halfway<FusedSGD, SGD>(SGDOptions(0.1).momentum(0.9));
  swap_halfway<FusedAdam, Adam>(AdamOptions(0.1).amsgrad(true));
  swap_halfway<FusedAdamW, AdamW>(AdamWOptions(0.1));
  swap_halfway<FusedAdagrad, Adagrad>(AdagradOptions(0.1).lr_decay(0.1));
}

template <class Fused, class Options>
void expect_refused(const Options& options) {
  const auto refuses = [&](const at::Tensor& bad, const at::Tensor& gradient) {
    auto good = at::ones({3}).requires_grad_(true);
    good.mutable_grad() = at::ones({3});
    bad.mutable_grad() = gradient;
    Fused optimizer({good, bad}, options);
    const auto before = optimizer.state().size();
    EXPECT_THROW(optimizer.step(), UsageError);
    EXPECT_TRUE(good.equal(at::ones({3}))) << "a refused step has changed something";
    EXPECT_EQ(optimizer.state().size(), before);
  };
  refuses(at::randn({4, 2}).requires_grad_(true), at::randn({4, 2}).to_sparse(1));
  const auto gaps = at::randn({4, 4}).slice(1, 0, 2).detach().requires_grad_(true);
  refuses(gaps, at::randn({4, 2}));
}

TEST(Fused, sparse_gradients_and_gaps_in_memory_are_refused_before_anything_changes) {
  expect_refused<FusedSGD>(SGDOptions(0.1));
  expect_refused<FusedAdam>(AdamOptions(0.1));
  expect_refused<FusedAdamW>(AdamWOptions(0.1));
  expect_refused<FusedAdagrad>(AdagradOptions(0.1));
}

template <class Fused, class Options>
void expect_foreign_state_refused(const Options& options) {
  auto first = at::ones({3}).requires_grad_(true), second = at::ones({2, 2}).requires_grad_(true);
  for (auto* parameter : {&first, &second}) parameter->mutable_grad() = at::ones_like(*parameter);
  Fused optimizer({first, second}, options);
  optimizer.state()[second.unsafeGetTensorImpl()] =
      std::make_unique<MuonParamState>(MuonParamState().momentum_buffer(at::zeros({2, 2})));
  EXPECT_THAT(test::refusal([&] { optimizer.step(); }),
              testing::HasSubstr("the state of parameter 1 of param group 0 [2, 2] is that of another optimizer"));
  EXPECT_TRUE(first.equal(at::ones({3}))) << "a refused step has changed something";
}

TEST(Fused, state_of_another_class_is_refused_before_anything_changes) {
  expect_foreign_state_refused<FusedSGD>(SGDOptions(0.1).momentum(0.9));
  expect_foreign_state_refused<FusedAdam>(AdamOptions(0.1));
  expect_foreign_state_refused<FusedAdamW>(AdamWOptions(0.1));
  expect_foreign_state_refused<FusedAdagrad>(AdagradOptions(0.1));
  expect_foreign_state_refused<Lamb>(LambOptions(0.1));  // as those whose base class looks
}

// Module::to changes the parameters' dtype, but not the state.
template <class Fused, class Plain, class Options>
void expect_change_of_dtype(const Options& options) {
  auto own = parameters(at::kFloat), reference = parameters(at::kFloat);
  Fused fused(own, options);
  Plain plain(reference, options);
  for (int step = 0; step < 6; ++step) {
    if (step == 3) {
      for (auto* list : {&own, &reference}) {
        for (auto& parameter : *list) parameter.set_data(parameter.detach().to(at::kDouble));
      }
    }
    set_gradients(own, step);
    set_gradients(reference, step);
    fused.step();
    plain.step();
  }
  for (size_t i = 0; i < own.size(); ++i) {
    EXPECT_EQ(own[i].scalar_type(), at::kDouble);
    EXPECT_TRUE(at::allclose(own[i], reference[i], 1e-5, 1e-5)) << i;
  }
}

TEST(Fused, parameters_may_change_their_dtype_in_mid_training) {
  expect_change_of_dtype<FusedSGD, SGD>(SGDOptions(0.1).momentum(0.9));
  expect_change_of_dtype<FusedAdam, Adam>(AdamOptions(0.1).amsgrad(true));
  expect_change_of_dtype<FusedAdamW, AdamW>(AdamWOptions(0.1));
  expect_change_of_dtype<FusedAdagrad, Adagrad>(AdagradOptions(0.1).lr_decay(0.1));
}

// A loaded state may have another order in memory than its parameter.
TEST(Fused, state_with_other_strides_is_taken_element_by_element) {
  auto own = parameters(at::kDouble), reference = parameters(at::kDouble);
  FusedAdam fused({own[2]}, AdamOptions(0.1));
  Adam plain({reference[2]}, AdamOptions(0.1));
  for (int step = 0; step < 4; ++step) {
    set_gradients(own, step);
    set_gradients(reference, step);
    fused.step();
    plain.step();
    auto& state = static_cast<AdamParamState&>(*fused.state().at(own[2].unsafeGetTensorImpl()));
    state.exp_avg(state.exp_avg().contiguous());
  }
  EXPECT_TRUE(at::allclose(own[2], reference[2], 1e-12, 1e-12));
}

TEST(Fused, OSS10_closure_is_run_with_gradients_and_its_loss_returned) {
  auto weight = at::full({2}, 3.0).requires_grad_(true);
  FusedSGD optimizer({weight}, SGDOptions(0.5));
  const auto loss = optimizer.step([&] {
    optimizer.zero_grad();
    auto sum = weight.sum();
    sum.backward();
    return sum;
  });
  EXPECT_EQ(loss.item<double>(), 6);
  EXPECT_TRUE(weight.equal(at::full({2}, 2.5)));
}

}  // namespace
}  // namespace shoal::fused_test
