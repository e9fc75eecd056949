// zero_grad in all forms and places.

#include "tests/conformance/behaviours.h"

namespace shoal::test {
namespace {

struct Form {
  std::string name;
  std::function<void(Trained&, torch::nn::Module&)> act;
};

void reset_by_hand(torch::nn::Module& module) {
  for (auto& parameter : module.parameters()) parameter.mutable_grad() = at::Tensor();
}
void zero_by_hand(torch::nn::Module& module) {
  for (auto& parameter : module.parameters()) {
    if (parameter.grad().defined()) parameter.grad().zero_();
  }
}

const std::vector<Form>& forms() {
  static const std::vector<Form> list{
      {"of_the_optimizer", [](Trained& training, torch::nn::Module&) { training.zero_grad(); }},
      {"of_the_base_class", [](Trained& training, torch::nn::Module&) { training.optimizer().zero_grad(); }},
      {"of_the_base_class_to_zero",
       [](Trained& training, torch::nn::Module&) { training.optimizer().zero_grad(false); }},
      {"of_the_module", [](Trained&, torch::nn::Module& model) { model.zero_grad(); }},
      {"of_the_module_to_zero", [](Trained&, torch::nn::Module& model) { model.zero_grad(false); }},
      {"by_hand_to_none", [](Trained&, torch::nn::Module& model) { reset_by_hand(model); }},
      {"by_hand_to_zero", [](Trained&, torch::nn::Module& model) { zero_by_hand(model); }},
  };
  return list;
}

enum class Place { before_forward, after_forward, after_step };

Behaviour zeroed(const Form& form, Place place, const std::string& where) {
  return {"zero_grad_" + form.name + "_" + where, [=](Bench& bench) {
            auto model = perceptron();
            auto training = bench.wrap(model);
            for (int64_t step = 0; step < 4; ++step) {
              if (place == Place::before_forward) form.act(*training, *model);
              const auto loss = loss_of(training->forward(bench.batch(step)));
              if (place == Place::after_forward) form.act(*training, *model);
              loss.backward();
              training->step();
              if (place == Place::after_step) form.act(*training, *model);
            }
            bench.same_parameters(*model);
          }};
}

// Loop in which `zero(step)` says whether gradients are dropped before the step.
template <class When>
void zeroed_when(Bench& bench, const When& when) {
  auto model = perceptron();
  auto training = bench.wrap(model);
  for (int64_t step = 0; step < 5; ++step) {
    if (when(step)) training->zero_grad();
    loss_of(training->forward(bench.batch(step))).backward();
    training->step();
  }
  bench.same_parameters(*model);
}

// Runs `act` on the gradients between backward and step.
template <class Act>
void before_the_update(Bench& bench, const Act& act) {
  auto model = perceptron();
  auto training = bench.wrap(model);
  for (int64_t step = 0; step < 4; ++step) {
    training->zero_grad();
    loss_of(training->forward(bench.batch(step))).backward();
    if (step != 1) act(*training, *model);
    training->step();
  }
  bench.same_parameters(*model);
}

}  // namespace

Behaviours zeroing() {
  Behaviours list;
  for (const auto& form : forms()) {
    list.push_back(zeroed(form, Place::before_forward, "before_forward"));
    list.push_back(zeroed(form, Place::after_forward, "between_forward_and_backward"));
    list.push_back(zeroed(form, Place::after_step, "after_step"));
  }
  const Behaviours others{
      {"zero_grad_never", [](Bench& bench) { zeroed_when(bench, [](int64_t) { return false; }); }},
      {"zero_grad_every_second_step",
       [](Bench& bench) { zeroed_when(bench, [](int64_t step) { return step % 2 == 0; }); }},
      {"zero_grad_at_the_start_only", [](Bench& bench) { zeroed_when(bench, [](int64_t step) { return step == 0; }); }},
      {"zero_grad_twice",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         for (int64_t step = 0; step < 3; ++step) {
           model->zero_grad();
           training->zero_grad();
           loss_of(training->forward(bench.batch(step))).backward();
           training->step();
           training->zero_grad();
           model->zero_grad(false);
         }
         bench.same_parameters(*model);
       }},
      {"zero_grad_to_none_then_step",
       [](Bench& bench) {
         before_the_update(bench, [](Trained& training, torch::nn::Module&) { training.optimizer().zero_grad(); });
       }},
      {"zero_grad_to_zero_then_step",
       [](Bench& bench) {
         before_the_update(bench, [](Trained& training, torch::nn::Module&) { training.optimizer().zero_grad(false); });
       }},
      {"zero_grad_of_the_module_then_step",
       [](Bench& bench) { before_the_update(bench, [](Trained&, torch::nn::Module& model) { model.zero_grad(); }); }},
      {"zero_grad_of_a_sub_module_then_step",
       [](Bench& bench) {
         before_the_update(bench, [](Trained&, torch::nn::Module& model) { model.children()[1]->zero_grad(); });
       }},
      {"zero_grad_of_a_sub_module_to_zero_then_step",
       [](Bench& bench) {
         before_the_update(bench, [](Trained&, torch::nn::Module& model) { model.children()[1]->zero_grad(false); });
       }},
      {"one_gradient_reset_by_hand",
       [](Bench& bench) {
         before_the_update(bench,
                           [](Trained&, torch::nn::Module& model) { model.parameters()[2].mutable_grad().reset(); });
       }},
      {"one_gradient_zeroed_by_hand",
       [](Bench& bench) {
         before_the_update(bench, [](Trained&, torch::nn::Module& model) { model.parameters()[2].grad().zero_(); });
       }},
      {"zero_grad_of_a_sub_module_before_forward",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         for (int64_t step = 0; step < 4; ++step) {
           model->second->zero_grad();  // the others accumulate
           loss_of(training->forward(bench.batch(step))).backward();
           training->step();
         }
         bench.same_parameters(*model);
       }},
      {"zero_grad_between_two_backwards",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         for (int64_t step = 0; step < 3; ++step) {
           training->zero_grad();
           loss_of(training->forward(bench.batch(step))).backward();
           training->zero_grad();
           loss_of(training->forward(bench.batch(step + 10))).backward();
           training->step();
         }
         bench.same_parameters(*model);
       }},
      {"zero_grad_between_two_backwards_by_the_module",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         for (int64_t step = 0; step < 3; ++step) {
           model->zero_grad();
           loss_of(training->forward(bench.batch(step))).backward();
           model->zero_grad();
           loss_of(training->forward(bench.batch(step + 10))).backward();
           training->step();
         }
         bench.same_parameters(*model);
       }},
      {"zero_grad_drops_what_no_sync_has_added_up",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         for (int64_t step = 0; step < 3; ++step) {
           {
             const auto local = training->no_sync();
             loss_of(training->forward(bench.batch(step))).backward();
           }
           training->zero_grad();
           loss_of(training->forward(bench.batch(step + 10))).backward();
           training->step();
           training->zero_grad();
         }
         bench.same_parameters(*model);
       }},
      {"zero_grad_of_the_module_drops_what_no_sync_has_added_up",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         for (int64_t step = 0; step < 3; ++step) {
           {
             const auto local = training->no_sync();
             loss_of(training->forward(bench.batch(step))).backward();
           }
           model->zero_grad();
           loss_of(training->forward(bench.batch(step + 10))).backward();
           training->step();
           model->zero_grad();
         }
         bench.same_parameters(*model);
       }},
  };
  list.insert(list.end(), others.begin(), others.end());
  return list;
}

}  // namespace shoal::test
