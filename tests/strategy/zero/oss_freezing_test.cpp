// OSS of parameters that are frozen and unfrozen while they are trained.

#include <gtest/gtest.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <iostream>

#include "shoal/error.h"
#include "shoal/optim.h"
#include "shoal/zero.h"
#include "tests/strategy/all/mean_gradients.h"

namespace shoal::test::oss_freezing_test {
namespace {

TEST(Oss, OSS05_unfreezing_in_mid_run_keeps_the_state_of_the_others) {
  auto model = seeded(1);
  auto reference = seeded(1);
  const auto freeze = [](Mlp& of, bool frozen) {
    for (auto& parameter : of->second->parameters()) parameter.requires_grad_(!frozen);
  };
  freeze(model, true);
  freeze(reference, true);
  const auto defaults = torch::optim::AdamOptions(1e-2);
  OSS<torch::optim::Adam> sharded(model->parameters(), defaults, group());
  torch::optim::Adam whole(reference->parameters(), defaults);
  const auto train = [&](int64_t begin, int64_t end) {
    for (int64_t step = begin; step < end; ++step) {
      set_mean_gradients(model, step);
      set_mean_gradients(reference, step);
      for (auto* of : {&model, &reference}) {
        for (const auto& parameter : (*of)->second->parameters()) {
          if (!parameter.requires_grad()) parameter.mutable_grad().reset();
        }
      }
      sharded.step();
      whole.step();
    }
  };
  train(0, 3);
  EXPECT_THROW(sharded.param_to_rank(model->second->weight), UsageError) << "frozen";
  freeze(model, false);
  freeze(reference, false);
  sharded.refresh_trainable();
  train(3, 6);
  EXPECT_EQ(difference(model->parameters(), reference->parameters()), 0);
}

// Trainable shares differ by at most the largest trainable parameter; the test logs the sizes.
void expect_balanced(const OSSCore& optimizer) {
  const auto sizes = optimizer.share_sizes();
  const auto [least, most] = std::minmax_element(sizes.trainable.begin(), sizes.trainable.end());
  EXPECT_LE(*most - *least, sizes.largest);
  if (group().rank() != 0) return;
  std::cout << "trainable elements by rank:";
  for (const auto numel : sizes.trainable) std::cout << " " << numel;
  std::cout << ", largest parameter " << sizes.largest << "; frozen:";
  for (const auto numel : sizes.frozen) std::cout << " " << numel;
  std::cout << std::endl;
}

// Matrices of one size, so that each of two ranks owns every other one.
struct Stack {
  explicit Stack(size_t count) {
    torch::manual_seed(7);
    for (size_t i = 0; i < count; ++i) list.push_back(at::randn({8, 8}, at::kDouble).requires_grad_(true));
  }
  void set_gradients(int64_t step) {
    for (size_t i = 0; i < list.size(); ++i) {
      torch::manual_seed(100 * step + static_cast<int64_t>(i));
      list[i].mutable_grad() = list[i].requires_grad() ? at::randn({8, 8}, at::kDouble) : at::Tensor();
    }
  }
  std::vector<at::Tensor> list;
};

TEST(Oss, OSS02_OSS05_freezing_one_ranks_share_balances_what_still_trains_and_state_moves_with_it) {
  const auto ranks = static_cast<size_t>(group().size());
  Stack model(4 * ranks);
  Stack reference(4 * ranks);
  const auto defaults = torch::optim::AdamOptions(1e-2);
  OSS<torch::optim::Adam> sharded(model.list, defaults, group());
  torch::optim::Adam whole(reference.list, defaults);
  int64_t number = 0;
  const auto train = [&] {
    for (int i = 0; i < 3; ++i, ++number) {
      model.set_gradients(number);
      reference.set_gradients(number);
      sharded.step();
      whole.step();
    }
    EXPECT_EQ(difference(model.list, reference.list), 0);
  };
  const auto freeze = [&](const auto& frozen) {
    for (size_t i = 0; i < model.list.size(); ++i) {
      for (auto* of : {&model, &reference}) of->list[i].requires_grad_(!frozen(i));
    }
    sharded.refresh_trainable();
    expect_balanced(sharded);
  };
  expect_balanced(sharded);
  train();
  const auto shares = sharded.partition();
  freeze([&](size_t i) {  // rank 0's whole share
    return std::any_of(shares[0].begin(), shares[0].end(), [&](const auto& t) { return t.is_same(model.list[i]); });
  });
  if (ranks > 1) {
    EXPECT_FALSE(sharded.partition()[0].empty());
  }
  train();
  freeze([](size_t) { return false; });
  train();
  freeze([&](size_t i) { return i < 3 * ranks; });
  train();
  freeze([](size_t) { return false; });
  train();
}

TEST(Oss, OSS05_the_state_of_a_frozen_parameter_is_there_when_it_is_unfrozen) {
  auto model = seeded(1);
  auto reference = seeded(1);
  const auto defaults = torch::optim::AdamOptions(1e-2);
  OSS<torch::optim::Adam> sharded(model->parameters(), defaults, group());
  torch::optim::Adam whole(reference->parameters(), defaults);
  for (int64_t step = 0; step < 8; ++step) {
    const bool frozen = step % 2 == 1;
    for (auto* of : {&model, &reference}) {
      set_mean_gradients(*of, step);
      for (auto& parameter : (*of)->second->parameters()) {
        parameter.requires_grad_(!frozen);
        if (frozen) parameter.mutable_grad().reset();
      }
    }
    sharded.refresh_trainable();
    sharded.step();
    whole.step();
  }
  EXPECT_EQ(difference(model->parameters(), reference->parameters()), 0);
  const auto state = sharded.state_dict(*model);
  EXPECT_EQ(state.at("second.weight").numbers.at("step"), 4);
  EXPECT_EQ(state.at("first.weight").numbers.at("step"), 8);
}

TEST(Oss, OSS05_a_frozen_parameter_with_a_gradient_is_updated_as_libtorch_does) {
  auto model = seeded(1);
  auto reference = seeded(1);
  const auto sgd = torch::optim::SGDOptions(0.1).momentum(0.9);
  OSS<torch::optim::SGD> sharded(model->parameters(), sgd, group());
  torch::optim::SGD whole(reference->parameters(), sgd);
  for (auto* of : {&model, &reference}) {
    for (auto& parameter : (*of)->second->parameters()) parameter.requires_grad_(false);
  }
  sharded.refresh_trainable();
  for (int64_t step = 0; step < 3; ++step) {
    set_mean_gradients(model, step);
    set_mean_gradients(reference, step);
    for (auto* of : {&model, &reference}) {
      if (step == 2) (*of)->second->weight.mutable_grad().reset();
    }
    sharded.step();
    whole.step();
  }
  EXPECT_EQ(difference(model->parameters(), reference->parameters()), 0);
}

}  // namespace
}  // namespace shoal::test::oss_freezing_test
