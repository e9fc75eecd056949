// Gradients that are on other ranks, or whose memory was given away: what reads them is told what to call.

#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>

#include <functional>

#include "tests/strategy/all/gradients_loop.h"
#include "tests/support/refusal.h"

namespace shoal::test::sharded_gradients_test {
namespace {

using namespace gradients_loop;

// Strategies that leave no whole gradient in grad(), on at least one rank.
const std::vector<std::string> sharded{"zero2", "megatron", "fsdp", "fsdp_grad_op", "fsdp_no_shard", "fsdp_hybrid"};

class Sharded : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(, Sharded, ::testing::ValuesIn(sharded), [](const auto& info) { return info.param; });

// Parameters whose grad() does not hold the gradient on this rank.
std::vector<at::Tensor> elsewhere(Loop& loop, const std::string& strategy) {
  std::vector<at::Tensor> list;
  for (const auto& parameter : loop.parameters()) {
    EXPECT_TRUE(parameter.grad().defined()) << "some rank has used it";
    const bool here =
        strategy == "zero2" && dynamic_cast<OSSCore&>(loop.optimizer()).param_to_rank(parameter) == group().rank();
    if (!here) list.push_back(parameter);
  }
  return list;
}

TEST_P(Sharded, what_reads_a_gradient_that_is_not_here_is_told_what_to_call) {
  Loop loop(GetParam());
  loop.run('b');
  const auto others = elsewhere(loop, GetParam());
  for (const auto& parameter : others) {
    const auto& grad = parameter.grad();
    EXPECT_EQ(grad.sizes(), parameter.sizes());
    EXPECT_EQ(grad.dtype(), parameter.dtype());
    for (const auto& act : std::vector<std::function<void()>>{
             [&] { grad.norm(); }, [&] { at::Tensor(grad).mul_(2); }, [&] { grad.clone(); }, [&] { grad.sum().item(); },
             [&] { at::zeros_like(grad).copy_(grad); }, [&] { grad.detach().add(1); }, [&] { grad.data().abs(); },
             [&] { grad.view({-1}).narrow(0, 0, 1).zero_(); }, [&] { at::Tensor(grad).add_(parameter.detach()); }}) {
      const auto text = test::refusal(act);
      EXPECT_NE(text.find("the gradient of parameter "), std::string::npos) << text;
      EXPECT_NE(text.find("clip with "), std::string::npos) << text;
      EXPECT_NE(text.find("zero_grad()"), std::string::npos) << text;
    }
    EXPECT_THROW(static_cast<void>(grad.data_ptr()), c10::Error);
  }
  if (!others.empty()) {
    EXPECT_NE(test::refusal([&] { torch::nn::utils::clip_grad_norm_(loop.parameters(), 1.0); }), "");
    EXPECT_NE(test::refusal([&] { torch::nn::utils::clip_grad_value_(loop.parameters(), 1.0); }), "");
    torch::optim::Adam by_mistake(others, torch::optim::AdamOptions(0.1));
    EXPECT_NE(test::refusal([&] { by_mistake.step(); }).find("update with"), std::string::npos);
  }
  group().barrier({-1, -1, "refused"}).wait();
  for (const char letter : std::string("szbsz")) EXPECT_NO_THROW(loop.run(letter)) << "training goes on";
}

TEST_P(Sharded, a_zeroed_gradient_reads_as_zeroes) {
  Loop whole, loop(GetParam());
  for (auto* one : {&whole, &loop}) {
    for (const char letter : std::string("bZ")) one->run(letter);
    EXPECT_EQ(torch::nn::utils::clip_grad_norm_(one->parameters(), 1.0), 0);
    for (const auto& parameter : one->parameters()) EXPECT_EQ(parameter.grad().abs().sum().item<double>(), 0);
    for (const char letter : std::string("bsz")) one->run(letter);
  }
  EXPECT_LT(difference(loop.parameters(), whole.parameters()), 1e-11);
}

TEST(ClipGradNorm, libtorchs_own_is_right_where_every_rank_has_the_gradients) {
  for (const auto* strategy : {"ddp", "zero1"}) {
    Loop whole, loop(strategy);
    for (int number = 0; number < 3; ++number) {
      for (auto* one : {&whole, &loop}) one->run('b');
      const auto norm = torch::nn::utils::clip_grad_norm_(whole.parameters(), 0.01);
      EXPECT_NEAR(torch::nn::utils::clip_grad_norm_(loop.parameters(), 0.01), norm, 1e-6 * norm);
      for (auto* one : {&whole, &loop}) {
        one->run('s');
        one->run('z');
      }
    }
    EXPECT_LT(difference(loop.parameters(), whole.parameters()), 1e-6);
  }
}

TEST(Megatron, a_second_step_with_gradients_whose_memory_was_given_away_is_refused) {
  Loop loop("megatron_in_grads");
  for (const char letter : std::string("bs")) loop.run(letter);
  const auto refused = [&] {
    const auto text = test::refusal([&] { loop.run('s'); });
    EXPECT_NE(text.find("reuse_grad_buf_for_param_gather"), std::string::npos) << text;
    group().barrier({-1, -1, "refused"}).wait();
  };
  refused();
  loop.run('b');  // accumulates on top of a stand-in
  refused();
  for (const char letter : std::string("zbs")) EXPECT_NO_THROW(loop.run(letter));
}

}  // namespace
}  // namespace shoal::test::sharded_gradients_test
