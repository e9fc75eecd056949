// Exceptions, and training on after them.

#include "shoal/error.h"
#include "tests/conformance/behaviours.h"

namespace shoal::test {
namespace {

struct Broken : std::runtime_error {
  Broken() : std::runtime_error("broken on purpose") {}
};

struct Fragile : Perceptron {
  using Perceptron::forward;
  at::Tensor forward(at::Tensor x) override {
    auto hidden = torch::tanh(first(x));
    if (fails) throw Broken();
    auto output = third(torch::tanh(second(hidden)));
    if (fails_in_backward) {
      output.register_hook([](const at::Tensor&) { throw Broken(); });
    }
    return output;
  }
  bool fails = false, fails_in_backward = false;
};

// `act` makes step 2 fail, and all ranks abandon the step.
template <class Act>
void given_up(Bench& bench, const Act& act) {
  auto model = std::make_shared<Fragile>();
  auto training = bench.wrap(model);
  for (int64_t step = 0; step < 5; ++step) {
    training->zero_grad();
    try {
      if (step == 2) act(*training, *model);
      loss_of(training->forward(bench.batch(step))).backward();
      training->step();
    } catch (const Broken&) {
    } catch (const StepAbandoned&) {
    }
    model->fails = model->fails_in_backward = false;
  }
  bench.same_parameters(*model);
}

}  // namespace

Behaviours failing() {
  return {
      {"an_exception_in_forward_on_all_ranks",
       [](Bench& bench) { given_up(bench, [](auto&, Fragile& model) { model.fails = true; }); }},
      {"an_exception_in_backward_on_all_ranks",
       [](Bench& bench) { given_up(bench, [](auto&, Fragile& model) { model.fails_in_backward = true; }); }},
      {"an_exception_in_the_loss_on_all_ranks",
       [](Bench& bench) {
         given_up(bench, [&](Trained& training, auto&) {
           const auto output = training.forward(bench.batch(2));
           throw Broken();
         });
       }},
      {"an_exception_in_evaluation_on_all_ranks",
       [](Bench& bench) {
         auto model = std::make_shared<Fragile>();
         auto training = bench.wrap(model);
         for (int64_t step = 0; step < 4; ++step) {
           train(bench, *training, step, step + 1);
           model->fails = step == 1;
           try {
             const torch::NoGradGuard guard;
             training->forward(bench.batch(30));
           } catch (const Broken&) {
           }
           model->fails = false;
         }
         bench.same_parameters(*model);
       }},
      {"an_exception_in_evaluation_on_one_rank",
       [](Bench& bench) {
         auto model = std::make_shared<Fragile>();
         auto training = bench.wrap(model);
         for (int64_t step = 0; step < 4; ++step) {
           train(bench, *training, step, step + 1);
           model->fails = step == 1 && bench.on(1);
           try {
             const torch::NoGradGuard guard;
             model->forward(bench.batch(30));
           } catch (const Broken&) {
           }
           model->fails = false;
         }
         bench.same_parameters(*model);
       }},
      {"an_exception_in_the_first_step",
       [](Bench& bench) {
         auto model = std::make_shared<Fragile>();
         auto training = bench.wrap(model);
         model->fails = true;
         try {
           training->forward(bench.batch(0));
         } catch (const Broken&) {
         }
         model->fails = false;
         train(bench, *training, 1, 4);
         bench.same_parameters(*model);
       }},
      {"an_exception_after_backward_before_step",
       [](Bench& bench) {
         auto model = std::make_shared<Fragile>();
         auto training = bench.wrap(model);
         for (int64_t step = 0; step < 4; ++step) {
           try {
             training->zero_grad();
             loss_of(training->forward(bench.batch(step))).backward();
             if (step == 1) throw Broken();
             training->step();
           } catch (const Broken&) {
           }
         }
         bench.same_parameters(*model);
       }},
      {"a_failed_forward_after_a_forward_without_backward",
       [](Bench& bench) {
         auto model = std::make_shared<Fragile>();
         auto training = bench.wrap(model);
         train(bench, *training, 0, 1);
         training->forward(bench.batch(1));
         try {
           const torch::NoGradGuard guard;
           model->fails = true;
           training->forward(bench.batch(2));
         } catch (const Broken&) {
         }
         model->fails = false;
         train(bench, *training, 3, 5);
         bench.same_parameters(*model);
       }},
  };
}

}  // namespace shoal::test
