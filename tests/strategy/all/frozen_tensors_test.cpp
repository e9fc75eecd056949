// Parameters that are frozen or unfrozen after their module was wrapped: training continues as in one process that does
// the same, or is refused.

#include <gmock/gmock.h>

#include "tests/strategy/all/replaced_tensors.h"
#include "tests/support/refusal.h"

namespace shoal::test::frozen_tensors_test {
namespace {

using namespace replaced_tensors;
using testing::HasSubstr;

TEST_P(ReplacedTensors, a_parameter_that_is_unfrozen_trains_or_is_refused_by_name) {
  auto training = training_of(std::make_shared<NetImpl>(1));
  OneProcess one(1);
  expect_like_one_process(
      training, one, [](NetImpl&) {}, When::before_step, 0);
  training.model->first->bias.requires_grad_(true);
  one.net->first->bias.requires_grad_(true);
  const bool follows = GetParam() == "ddp" || GetParam().starts_with("zero");
  if (follows) {
    expect_like_one_process(
        training, one, [](NetImpl&) {}, When::before_step, 0);
    return;
  }
  training.zero_grad();
  EXPECT_THAT(refusal([&] {
                mean_loss(training.forward(batch(group().rank(), 9))).backward();
                training.step();
              }),
              HasSubstr("parameter first.bias"));
  training.model->first->bias.requires_grad_(false);
  one.net->first->bias.requires_grad_(false);
  training.model->first->bias.mutable_grad().reset();
  expect_like_one_process(
      training, one, [](NetImpl&) {}, When::before_step, 0);
}

TEST_P(ReplacedTensors, a_parameter_may_be_frozen_and_with_it_all_of_its_bucket) {
  for (const bool finds_unused : {false, true}) {
    SCOPED_TRACE(finds_unused ? "unused parameters are found" : "all parameters are used");
    auto training = training_of(std::make_shared<NetImpl>(1), /*bucket_mb=*/0.0001, finds_unused);
    OneProcess one(1);
    expect_like_one_process(
        training, one, [](NetImpl&) {}, When::before_step, 0);
    for (auto* net : {training.model.get(), one.net.get()}) {
      for (auto& parameter : {net->second->weight, net->third->bias}) {
        parameter.set_requires_grad(false);
        at::Tensor(parameter).mutable_grad().reset();
      }
    }
    const auto frozen = training.model->third->bias.detach().clone();
    expect_like_one_process(
        training, one, [](NetImpl&) {}, When::before_step, 0);
    EXPECT_TRUE(at::equal(training.model->third->bias.detach(), frozen));
    if (HasFatalFailure()) return;
  }
}

TEST_P(ReplacedTensors, BEY04_a_parameter_frozen_between_micro_batches_has_what_they_gave) {
  for (const bool weighted : {false, true}) {
    auto training = training_of(std::make_shared<NetImpl>(1));
    OneProcess one(1);
    const auto set_trainable = [&](bool trainable) {
      for (auto* net : {training.model.get(), one.net.get()}) net->second->weight.requires_grad_(trainable);
    };
    const auto backward = [&](int64_t number, int micros) {
      const auto loss = mean_loss(training.forward(batch(group().rank(), number)));
      weighted ? training.backward(loss * 4, 4) : loss.backward();
      for (int rank = 0; rank < group().size(); ++rank) {
        (mean_loss(one.net->forward(batch(rank, number))) / group().size() / (weighted ? micros : 1)).backward();
      }
    };
    for (int64_t step = 0; step < 3; ++step) {
      training.optimizer().zero_grad();
      training.zero_grad();
      one.optimizer.zero_grad();
      {
        const auto local = training.no_sync(true);
        backward(10 + step, 2);
      }
      set_trainable(false);
      backward(step, 2);
      if (step == 2) backward(20, 1);  // nothing is left by now
      set_trainable(true);
      training.step();
      one.optimizer.step();
      ASSERT_LT(difference(training.model->parameters(), one.net->parameters()), 1e-10)
          << "weighted " << weighted << ", step " << step;
    }
  }
}

}  // namespace
}  // namespace shoal::test::frozen_tensors_test
