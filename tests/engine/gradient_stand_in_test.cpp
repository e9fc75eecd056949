// Stand-ins in grad() on ranks that do not hold the whole sum of a gradient.

#include "engine/gradients/gradient_stand_in.h"

#include <c10/util/ScopeExit.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/sgd.h>

#include "shoal/error.h"
#include "tests/support/refusal.h"

namespace shoal {
namespace {

const std::string about = "the gradient of parameter weight, which is elsewhere: call this";

struct WithStandIn {
  WithStandIn() { module->weight.mutable_grad() = stand_in.tensor(); }
  const at::Tensor& grad() const { return module->weight.grad(); }
  torch::nn::Conv2d module{torch::nn::Conv2dOptions(2, 3, 1).bias(false)};
  GradientStandIn stand_in{module->weight, about};
};

TEST(GradientStandIn, looks_like_the_gradient_and_has_no_memory) {
  WithStandIn with;
  EXPECT_EQ(with.grad().sizes(), with.module->weight.sizes());
  EXPECT_EQ(with.grad().strides(), with.module->weight.strides());
  EXPECT_EQ(with.grad().dtype(), with.module->weight.dtype());
  EXPECT_EQ(with.grad().device(), with.module->weight.device());
  EXPECT_FALSE(with.grad().requires_grad());
  EXPECT_THROW(static_cast<void>(with.grad().data_ptr()), c10::Error);
  EXPECT_THROW(static_cast<void>(with.grad().const_data_ptr<float>()), c10::Error);
  EXPECT_EQ(at::zeros_like(with.grad()).sum().item<float>(), 0) << "reads nothing";
}

TEST(GradientStandIn, every_operator_that_reads_or_writes_is_refused) {
  WithStandIn with;
  auto grad = with.grad();
  for (const auto& act : std::vector<std::function<void()>>{
           [&] { grad.add_(1); }, [&] { grad.mul_(0); }, [&] { grad.norm(); }, [&] { grad.fill_(1); },
           [&] { at::ones_like(with.module->weight).copy_(grad); }, [&] { grad.copy_(at::ones_like(grad)); },
           [&] { at::_foreach_mul_({grad}, 2.0); }, [&] { at::_foreach_norm({grad}); }, [&] { grad.detach().clone(); },
           [&] { grad.select(0, 0).zero_(); }, [&] { grad.to(at::kDouble); }, [&] { grad.isfinite().all().item(); },
           [&] { std::stringstream() << grad; }, [&] { torch::nn::utils::clip_grad_norm_({with.module->weight}, 1); },
           [&] { torch::optim::SGD(with.module->parameters(), 0.1).step(); }}) {
    const auto text = test::refusal(act);
    EXPECT_NE(text.find(" takes " + about), std::string::npos) << text;
  }
  EXPECT_FALSE(with.stand_in.zeroed());
}

TEST(GradientStandIn, is_known_through_aliases_and_notices_every_way_to_zero_it) {
  const auto zeroes = [](const std::function<void(WithStandIn&)>& act) {
    WithStandIn with;
    act(with);
    EXPECT_TRUE(with.stand_in.is(with.grad()));
    EXPECT_TRUE(with.stand_in.zeroed());
    with.stand_in.renew();
    EXPECT_FALSE(with.stand_in.zeroed());
    EXPECT_THROW(with.grad().sum(), UsageError);
  };
  zeroes([](auto& with) { with.module->zero_grad(/*set_to_none=*/false); });
  zeroes([](auto& with) { torch::optim::SGD(with.module->parameters(), 0.1).zero_grad(/*set_to_none=*/false); });
  zeroes([](auto& with) { at::Tensor(with.grad()).zero_(); });
  zeroes([](auto& with) { with.grad().data().zero_(); });
  zeroes([](auto& with) { with.grad().view({-1}).zero_(); });
  zeroes([](auto& with) { at::Tensor(with.grad()).fill_(0); });
  WithStandIn with;
  EXPECT_FALSE(with.stand_in.is(at::zeros({2})));
  EXPECT_FALSE(with.stand_in.is(at::Tensor()));
}

TEST(GradientStandIn, to_what_it_is_already_returns_itself_where_python_asks_for_it) {
  WithStandIn with;
  EXPECT_NE(test::refusal([&] { with.grad().to(at::kFloat); }).find("aten::to takes " + about), std::string::npos);
  let_stand_ins_pass_to(true);
  const auto restore = c10::make_scope_exit([] { let_stand_ins_pass_to(false); });
  for (const auto& same : {with.grad().to(at::kCPU), with.grad().to(at::kFloat), with.grad().to(with.module->weight),
                           with.grad().to(with.module->weight.options())}) {
    EXPECT_TRUE(with.stand_in.is(same));
  }
  EXPECT_FALSE(with.stand_in.zeroed());
  for (const auto& convert : std::vector<std::function<void()>>{[&] { with.grad().to(at::kDouble); },
                                                                [&] { with.grad().to(at::kFloat, false, true); }}) {
    const auto text = test::refusal(convert);
    EXPECT_NE(text.find("aten::_to_copy takes " + about + " (to convert the module, call zero_grad() before)"),
              std::string::npos)
        << text;
  }
}

TEST(GradientStandIn, becomes_real_when_it_is_read_after_it_was_zeroed) {
  WithStandIn with;
  at::Tensor(with.grad()).zero_();
  EXPECT_EQ(torch::nn::utils::clip_grad_norm_({with.module->weight}, 1), 0);
  EXPECT_TRUE(with.stand_in.real());
  EXPECT_FALSE(with.stand_in.is(with.grad()));
  at::Tensor(with.grad()).add_(2);
  EXPECT_EQ(with.grad().sum().item<float>(), 12) << "a tensor as any other";
}

}  // namespace
}  // namespace shoal
