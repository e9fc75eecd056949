// Stand-ins in grad() for gradients that backward has used for its update.

#include "engine/gradients/spent_gradients.h"

#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>

#include "shoal/error.h"
#include "tests/support/refusal.h"

namespace shoal {
namespace {

struct WithSpent {
  WithSpent() {
    for (const auto* name : {"a", "b", "c"}) gradients.push_back({name, at::ones({2, 3}).set_requires_grad(true)});
    spent.emplace(gradients, "Strategy", "which has been used: clip with this");
  }
  at::Tensor& grad(size_t gradient) { return gradients[gradient].parameter.mutable_grad(); }
  void leave() {
    for (size_t i = 0; i < gradients.size(); ++i) spent->leave(i);
  }
  std::vector<Gradient> gradients;
  std::optional<SpentGradients> spent;
};

TEST(SpentGradients, are_refused_to_what_reads_them_and_go_before_the_next_backward) {
  WithSpent with;
  for (int step = 0; step < 3; ++step) {
    with.leave();
    std::vector<at::Tensor> parameters;
    for (const auto& gradient : with.gradients) parameters.push_back(gradient.parameter);
    const auto text = test::refusal([&] { torch::nn::utils::clip_grad_norm_(parameters, 1); });
    EXPECT_NE(text.find("takes the gradient of parameter a, which has been used: clip with this"), std::string::npos);
    with.spent->clear();
    for (size_t i = 0; i < 3; ++i) EXPECT_FALSE(with.grad(i).defined());
  }
  with.leave();
  with.spent.reset();
  EXPECT_FALSE(with.grad(0).defined()) << "they go with the object";
}

TEST(SpentGradients, the_same_tensors_stand_in_every_step) {
  WithSpent with;
  with.leave();
  const auto first = with.grad(1);
  with.spent->clear();
  with.leave();
  EXPECT_TRUE(with.grad(1).is_same(first));
}

TEST(SpentGradients, may_all_be_zeroed_and_all_be_dropped) {
  WithSpent with;
  for (const bool zeroed : {true, false, true}) {
    with.leave();
    for (size_t i = 0; i < 3; ++i) zeroed ? static_cast<void>(with.grad(i).zero_()) : with.grad(i).reset();
    EXPECT_NO_THROW(with.spent->clear());
    EXPECT_FALSE(with.grad(0).defined());
  }
  with.leave();
  for (size_t i = 0; i < 3; ++i) with.grad(i).zero_();
  for (size_t i = 0; i < 3; ++i) with.grad(i).reset();
  EXPECT_NO_THROW(with.spent->clear());
}

TEST(SpentGradients, some_by_themselves_are_refused_once) {
  for (const auto& act : std::vector<std::function<void(WithSpent&)>>{[](WithSpent& with) { with.grad(1).zero_(); },
                                                                      [](WithSpent& with) { with.grad(1).reset(); },
                                                                      [](WithSpent& with) {
                                                                        with.grad(1).zero_();
                                                                        for (size_t i = 0; i < 3; ++i)
                                                                          with.grad(i).reset();
                                                                      }}) {
    WithSpent with;
    with.leave();
    with.spent->check();
    act(with);
    const auto text = test::refusal([&] { with.spent->clear(); });
    EXPECT_NE(text.find("Strategy: after the last backward, the gradient of parameter b was zeroed or dropped"),
              std::string::npos)
        << text;
    EXPECT_NO_THROW(with.spent->clear());
    with.leave();
    EXPECT_NO_THROW(with.spent->clear());
    with.leave();
    act(with);
    EXPECT_EQ(test::refusal([&] { with.spent->check(); }), text);
  }
}

TEST(SpentGradients, check_sees_what_zero_grad_hides_from_the_next_backward) {
  WithSpent with;
  with.leave();
  with.grad(1).reset();
  EXPECT_THROW(with.spent->check(), UsageError);
  for (size_t i = 0; i < 3; ++i) with.grad(i).reset();
  EXPECT_NO_THROW(with.spent->check());
  EXPECT_NO_THROW(with.spent->clear());
}

TEST(SpentGradients, others_in_their_place_stay_and_those_of_frozen_parameters_are_not_missed) {
  WithSpent with;
  with.leave();
  with.grad(0) = at::ones({2, 3});
  EXPECT_NO_THROW(with.spent->clear());
  EXPECT_EQ(with.grad(0).sum().item<float>(), 6);
  with.leave();
  with.gradients[2].parameter.requires_grad_(false);
  for (size_t i = 0; i < 2; ++i) with.grad(i).reset();
  EXPECT_NO_THROW(with.spent->clear());
}

}  // namespace
}  // namespace shoal
