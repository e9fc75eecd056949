// Changes of strategy that are refused, and one after a step that has failed (BEY15).

#include <gmock/gmock.h>

#include <stdexcept>

#include "tests/support/refusal.h"
#include "tests/training/replan_training.h"

namespace shoal::replan_refused_test {
namespace {

using namespace replan_training;
using testing::HasSubstr;

// A refusal leaves the training as it is.
TEST(Replan, BEY15_refusals_are_on_every_rank_and_change_nothing) {
  auto training = make_training("zero2", net(3), adamw(), group(), options_of("zero2"));
  steps(training, 0, 2);
  const auto before = parameters_of(training);
  const auto state = training->optimizer_state();
  const auto x = test::batch(group().rank(), 2).to(at::kFloat);
  const auto refused = [&](const auto& act) {
    const auto text = test::refusal<Error>(act);
    expect_equal(parameters_of(training), before);
    expect_equal(training->optimizer_state(), state);
    return text;
  };
  const auto to = [&](const std::string& name, const TrainingOptions& options = {}) {
    return refused([&] { training.replan(name, options); });
  };
  EXPECT_THAT(to("zero9"), HasSubstr("unknown strategy 'zero9'"));
  EXPECT_THAT(to("local"), HasSubstr("strategy local know nothing of each other"));
  EXPECT_THAT(to("ddp", {.options = {{"unit_numel", "5"}}}), HasSubstr("ddp does not have it"));
  EXPECT_THAT(to("ddp", {.clip_grad = -1}), HasSubstr("clip_grad -1"));
  EXPECT_THAT(refused([&] { training.replan("fsdp", {}, sgd()); }), HasSubstr("momentum_buffer"))
      << "state of another optimizer";
  TrainingOptions ignoring;
  ignoring.ignored = {"gain"};
  EXPECT_THAT(to("ddp", ignoring), HasSubstr("gain"));
  {
    const auto scope = training->no_sync(true);
    EXPECT_THAT(to("fsdp"), HasSubstr("within no_sync()"));
    training->backward(training.forward(x).sum());
  }
  const auto gradient = test::refusal([&] { training.replan("fsdp"); });
  EXPECT_THAT(gradient, HasSubstr("has a gradient, which would be lost"));
  training->zero_grad();
  training->backward(training.forward(x).sum());
  EXPECT_EQ(test::refusal([&] { training.replan("fsdp"); }).find("nothing"), std::string::npos) << "before step()";
  training->zero_grad();
  if (group().size() > 1) {
    const auto own = group().rank() == 0 ? "fsdp" : "ddp";
    EXPECT_THAT(to(own), HasSubstr("the arguments of replan: ranks disagree"));
    EXPECT_THAT(to(group().rank() == 0 ? "fsdp" : "zero9"), HasSubstr("unknown strategy 'zero9'"))
        << "on one rank alone";
    EXPECT_THAT(refused([&] { training.replan(group().rank() == 0 ? "fsdp" : "zero9"); }),
                HasSubstr("unknown strategy 'zero9'"));
  }
  training.replan("fsdp", options_of("fsdp"));
  expect_equal(training->optimizer_state(), state);
  {
    const auto scope = training->full_parameters();
    EXPECT_THAT(test::refusal([&] { training.replan("ddp"); }), HasSubstr("within full_parameters()"));
  }
  auto mean = make_training("decentralized", net(3), adamw(), group());
  {
    const auto scope = mean->full_parameters();
    EXPECT_THAT(test::refusal([&] { mean.replan("ddp"); }), HasSubstr("within full_parameters()"));
  }
  auto alone = make_training("local", net(3), adamw(), group());
  EXPECT_THAT(test::refusal([&] { alone.replan("ddp"); }), HasSubstr("strategy local know nothing of each other"));
}

TEST(Replan, BEY15_after_an_exception_in_a_step) {
  if (group().size() < 2) return;
  for (const auto* name : {"ddp", "zero2", "fsdp", "megatron"}) {
    SCOPED_TRACE(name);
    auto training = make_training(name, net(3), adamw(), group(), options_of(name));
    steps(training, 0, 2);
    const auto before = parameters_of(training);
    const auto x = test::batch(group().rank(), 2).to(at::kFloat);
    if (group().rank() == 1) {
      const auto loss = training.forward(x).pow(2).mean();
      const auto& weight = training.module()->first->weight;  // its gradient comes last
      const auto fault = [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("a fault in a hook"); };
      const auto hook = weight.register_hook(fault);
      EXPECT_THROW(training->backward(loss), std::exception);
      weight.remove_hook(hook);
    } else {
      EXPECT_THROW(training->backward(training.forward(x).pow(2).mean()), StepAbandoned);
    }
    for (const auto& parameter : training.module()->parameters()) EXPECT_FALSE(parameter.grad().defined());
    training.replan("zero1", options_of("zero1"));
    expect_equal(parameters_of(training), before);
    steps(training, 3, 4);
  }
}

}  // namespace
}  // namespace shoal::replan_refused_test
