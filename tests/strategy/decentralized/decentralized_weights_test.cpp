// Weights of decentralised ranks that a step does not use: of micro-batches that were dropped, and of other steps.

#include <torch/autograd.h>
#include <torch/optim/sgd.h>

#include "shoal/error.h"
#include "tests/strategy/decentralized/decentralized_ring.h"

namespace shoal::decentralized_weights_test {
namespace {

using namespace test;  // NOLINT(google-build-using-namespace): helpers of this folder's tests

at::Tensor sum_of(const at::Tensor& output) {
  return output.pow(2).sum();
}

// Weight of a rank's step, and its mean over the ranks.
double own_weight() {
  return 1.0 + me();
}
double mean_weight() {
  return (1.0 + group().size()) / 2;
}

struct Ways {
  const char* name;
  void (*drop)(MlpImpl& model);
};
const Ways ways[] = {{"to none", [](MlpImpl& model) { model.zero_grad(); }},
                     {"to zero", [](MlpImpl& model) { model.zero_grad(/*set_to_none=*/false); }},
                     {"one by one", [](MlpImpl& model) {
                        for (auto& parameter : model.parameters()) parameter.mutable_grad().reset();
                      }}};

// In the first step the mean of the weights is exact.
struct FirstStep {
  FirstStep()
      : parallel(model, optimizer_recipe<torch::optim::SGD>(torch::optim::SGDOptions(0.1)), group(),
                 {.topology = ring(), .bucket_cap_mb = small_bucket}) {}
  at::Tensor forward(int64_t step) { return parallel.forward(batch(me(), step)); }
  void expect(const std::vector<at::Tensor>& gradients, double divisor) {
    for (size_t i = 0; i < before.size(); ++i) before[i] -= 0.1 * gradients[i] / divisor;
    EXPECT_LT(difference(model->parameters(), before), 1e-12);
  }

  Mlp model = seeded(1);
  std::vector<at::Tensor> before = copies(*model);
  DecentralizedDataParallel<MlpImpl> parallel;
};

TEST(Decentralized, BEY04_a_micro_batch_that_was_dropped_has_no_weight) {
  for (const auto& way : ways) {
    for (const bool weighted : {true, false}) {
      SCOPED_TRACE(std::string(way.name) + (weighted ? ", then weighted" : ", then plain"));
      FirstStep first;
      const auto loss =
          weighted ? sum_of(first.model->forward(batch(me(), 1))) : mean_loss(first.model->forward(batch(me(), 1)));
      const auto gradients = torch::autograd::grad({loss}, first.model->parameters());
      {
        const auto scope = first.parallel.no_sync();
        first.parallel.backward(sum_of(first.forward(0)), 5);
        way.drop(*first.model);
      }
      if (weighted) {
        first.parallel.backward(sum_of(first.forward(1)), own_weight());
      } else {
        mean_loss(first.forward(1)).backward();
      }
      first.expect(gradients, weighted ? mean_weight() : 1);
    }
  }
}

TEST(Decentralized, BEY04_a_micro_batch_without_a_weight_that_was_dropped_may_be_followed_by_one_with) {
  FirstStep first;
  const auto gradients =
      torch::autograd::grad({sum_of(first.model->forward(batch(me(), 1)))}, first.model->parameters());
  {
    const auto scope = first.parallel.no_sync();
    mean_loss(first.forward(0)).backward();
  }
  EXPECT_THROW(first.parallel.backward(sum_of(first.forward(1)), own_weight()), UsageError);
  first.model->zero_grad();
  first.parallel.backward(sum_of(first.forward(1)), own_weight());
  first.expect(gradients, mean_weight());
}

TEST(Decentralized, BEY04_micro_batches_that_were_not_dropped_keep_their_weight) {
  for (const bool zeros : {false, true}) {  // gradients that are zero, and were not written by the program
    SCOPED_TRACE(zeros ? "zeros" : "values");
    FirstStep first;
    const double factor = zeros ? 0 : 1;
    const auto loss =
        factor * sum_of(first.model->forward(batch(me(), 0))) + sum_of(first.model->forward(batch(me(), 1)));
    const auto gradients = torch::autograd::grad({loss}, first.model->parameters());
    {
      const auto scope = first.parallel.no_sync();
      first.parallel.backward(factor * sum_of(first.forward(0)), 5);
    }
    first.parallel.backward(sum_of(first.forward(1)), own_weight());
    first.expect(gradients, mean_weight() + 5);
  }
}

TEST(Decentralized, BEY04_plain_steps_leave_the_weights_of_others_as_they_are) {
  auto simulation = simulated();
  auto model = seeded(1);
  DecentralizedDataParallel parallel(
      model, plain(), group(), {.topology = ring(), .neighbour_timeout_seconds = 60, .bucket_cap_mb = small_bucket});
  for (int64_t step = 0; step < 8; ++step) {
    const bool weighted = step % 3 == 0;
    const auto output = parallel.forward(batch(me(), step));
    if (weighted) {
      parallel.backward(sum_of(output), own_weight());
    } else {
      mean_loss(output).backward();
    }
    simulation.step([&](MlpImpl& of, int rank) {
      const auto expected = of.forward(batch(rank, step));
      return weighted ? sum_of(expected) / mean_weight() : mean_loss(expected);
    });
    expect_equal(model, simulation);
  }
}

}  // namespace
}  // namespace shoal::decentralized_weights_test
