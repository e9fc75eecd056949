// Unusual orders of step, forward and backward; accumulation.

#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>
#include <torch/optim/schedulers/step_lr.h>

#include "shoal/schedules.h"
#include "tests/conformance/behaviours.h"

namespace shoal::test {
namespace {

// Runs `act` as the backwards of each step.
template <class Act>
void stepping(Bench& bench, const Act& act, const Setup& setup = {}, int64_t steps = 4) {
  auto model = perceptron();
  auto training = bench.wrap(model, setup);
  for (int64_t step = 0; step < steps; ++step) {
    training->zero_grad();
    act(*training, step);
    training->step();
  }
  bench.same_parameters(*model);
}

// Micro-batches of a step, the last of which synchronises unless `never`.
template <class Zero>
void accumulating(Bench& bench, bool no_sync, const Zero& zero, double divisor = 3) {
  auto model = perceptron();
  auto training = bench.wrap(model);
  for (int64_t step = 0; step < 4; ++step) {
    zero(*training, *model);
    for (int64_t micro = 0; micro < 3; ++micro) {
      const auto local = training->no_sync(no_sync && micro < 2);
      (loss_of(training->forward(bench.batch(10 * step + micro))) / divisor).backward();
    }
    training->step();
  }
  bench.same_parameters(*model);
}

Setup with_adam() {
  Setup setup;
  setup.optimizer = torch::optim::AdamOptions(0.01).weight_decay(0.01);
  return setup;
}

template <class Make, class Step>
void scheduled(Bench& bench, const Make& make, const Step& step_schedule) {
  auto model = perceptron();
  auto training = bench.wrap(model);
  auto schedule = make(training->optimizer());
  for (int64_t step = 0; step < 5; ++step) {
    train(bench, *training, step, step + 1);
    step_schedule(schedule, step);
    bench.same("rate", training->optimizer().param_groups()[0].options().get_lr());
  }
  bench.same_parameters(*model);
}

}  // namespace

Behaviours step_orders() {
  return {
      {"a_plain_loop",
       [](Bench& bench) {
         stepping(bench, [&](auto& t, int64_t step) { loss_of(t.forward(bench.batch(step))).backward(); });
       }},
      {"a_plain_loop_with_adam",
       [](Bench& bench) {
         stepping(
             bench, [&](auto& t, int64_t step) { loss_of(t.forward(bench.batch(step))).backward(); }, with_adam());
       }},
      {"a_loop_through_the_base_class",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         torch::optim::Optimizer& optimizer = training->optimizer();
         for (int64_t step = 0; step < 4; ++step) {
           optimizer.zero_grad();
           loss_of(training->forward(bench.batch(step))).backward();
           optimizer.step();
         }
         bench.same_parameters(*model);
       }},
      {"a_step_with_a_closure",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         for (int64_t step = 0; step < 4; ++step) {
           training->optimizer().step([&] {
             training->optimizer().zero_grad();
             auto loss = loss_of(training->forward(bench.batch(step)));
             loss.backward();
             return loss;
           });
         }
         bench.same_parameters(*model);
       }},
      {"step_twice_after_one_backward",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         for (int64_t step = 0; step < 3; ++step) {
           train(bench, *training, step, step + 1);
           training->step();
         }
         bench.same_parameters(*model);
       }},
      {"step_before_the_first_backward",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         training->step();
         train(bench, *training, 0, 3);
         bench.same_parameters(*model);
       }},
      {"step_without_a_backward_between",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model, with_adam());
         train(bench, *training, 0, 2);
         training->zero_grad();
         training->step();
         train(bench, *training, 2, 4);
         bench.same_parameters(*model);
       }},
      {"step_after_a_forward_without_backward",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         train(bench, *training, 0, 2);
         training->zero_grad();
         training->forward(bench.batch(2));
         training->step();
         train(bench, *training, 3, 5);
         bench.same_parameters(*model);
       }},
      {"step_after_no_sync_alone",
       [](Bench& bench) {
         stepping(bench, [&](auto& t, int64_t step) {
           const auto local = t.no_sync(step == 2);
           loss_of(t.forward(bench.batch(step))).backward();
         });
       }},
      {"step_every_second_backward",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         for (int64_t step = 0; step < 6; ++step) {
           (loss_of(training->forward(bench.batch(step))) / 2).backward();
           if (step % 2 == 1) {
             training->step();
             training->zero_grad();
           }
         }
         bench.same_parameters(*model);
       }},
      {"two_forwards_one_backward",
       [](Bench& bench) {
         stepping(bench, [&](auto& t, int64_t step) {
           const auto a = t.forward(bench.batch(step));
           const auto b = t.forward(bench.batch(step + 10));
           (loss_of(a) + loss_of(b)).backward();
         });
       }},
      {"two_forwards_then_two_backwards",
       [](Bench& bench) {
         stepping(bench, [&](auto& t, int64_t step) {
           const auto a = loss_of(t.forward(bench.batch(step)));
           const auto b = loss_of(t.forward(bench.batch(step + 10)));
           a.backward();
           b.backward();
         });
       }},
      {"one_forward_two_backwards_of_its_graph",
       [](Bench& bench) {
         stepping(bench, [&](auto& t, int64_t step) {
           const auto loss = loss_of(t.forward(bench.batch(step)));
           loss.backward({}, true);
           loss.backward();
         });
       }},
      {"one_forward_two_losses_backward_by_backward",
       [](Bench& bench) {
         stepping(bench, [&](auto& t, int64_t step) {
           const auto output = t.forward(bench.batch(step));
           output.pow(2).mean().backward({}, true);
           output.abs().mean().backward();
         });
       }},
      {"two_losses_added_up",
       [](Bench& bench) {
         stepping(bench, [&](auto& t, int64_t step) {
           const auto output = t.forward(bench.batch(step));
           (output.pow(2).mean() + 0.1 * output.abs().mean()).backward();
         });
       }},
      {"forward_without_backward_before_the_step",
       [](Bench& bench) {
         stepping(bench, [&](auto& t, int64_t step) {
           t.forward(bench.batch(step + 20));
           loss_of(t.forward(bench.batch(step))).backward();
         });
       }},
      {"forward_without_backward_after_backward",
       [](Bench& bench) {
         stepping(bench, [&](auto& t, int64_t step) {
           loss_of(t.forward(bench.batch(step))).backward();
           t.forward(bench.batch(step + 20));
         });
       }},
      {"forward_of_the_module_itself",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         for (int64_t step = 0; step < 4; ++step) {
           training->zero_grad();
           loss_of(model->forward(bench.batch(step))).backward();
           training->step();
         }
         bench.same_parameters(*model);
       }},
      {"forward_of_wrapper_and_module_by_turns",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         for (int64_t step = 0; step < 4; ++step) {
           training->zero_grad();
           const auto x = bench.batch(step);
           loss_of(step % 2 == 0 ? model->forward(x) : training->forward(x)).backward();
           training->step();
         }
         bench.same_parameters(*model);
       }},
      {"accumulation_without_no_sync",
       [](Bench& bench) { accumulating(bench, false, [](auto& t, auto&) { t.zero_grad(); }); }},
      {"accumulation_under_no_sync",
       [](Bench& bench) { accumulating(bench, true, [](auto& t, auto&) { t.zero_grad(); }); }},
      {"accumulation_of_sums",
       [](Bench& bench) {
         accumulating(
             bench, true, [](auto& t, auto&) { t.zero_grad(); }, 1);
       }},
      {"accumulation_zeroed_by_the_module",
       [](Bench& bench) { accumulating(bench, true, [](auto&, auto& model) { model.zero_grad(); }); }},
      {"accumulation_zeroed_by_the_base_class_to_zero",
       [](Bench& bench) { accumulating(bench, true, [](auto& t, auto&) { t.optimizer().zero_grad(false); }); }},
      {"accumulation_of_different_lengths",
       [](Bench& bench) {
         stepping(bench, [&](auto& t, int64_t step) {
           for (int64_t micro = 0; micro <= step; ++micro) {
             const auto local = t.no_sync(micro < step);
             (loss_of(t.forward(bench.batch(10 * step + micro))) / (step + 1)).backward();
           }
         });
       }},
      {"accumulation_with_forwards_outside_no_sync",
       [](Bench& bench) {
         stepping(bench, [&](auto& t, int64_t step) {
           const auto a = loss_of(t.forward(bench.batch(step)));
           {
             const auto local = t.no_sync();
             a.backward();
           }
           loss_of(t.forward(bench.batch(step + 10))).backward();
         });
       }},
      {"accumulation_carried_over_a_step",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         for (int64_t step = 0; step < 6; ++step) {
           loss_of(training->forward(bench.batch(step))).backward();
           training->step();
           if (step % 3 == 2) training->zero_grad();
         }
         bench.same_parameters(*model);
       }},
      {"rate_changed_in_the_options",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         for (int64_t step = 0; step < 4; ++step) {
           for (auto& group : training->optimizer().param_groups()) group.options().set_lr(0.1 / (1 + step));
           train(bench, *training, step, step + 1);
         }
         bench.same_parameters(*model);
       }},
      {"momentum_changed_in_the_options",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         for (int64_t step = 0; step < 4; ++step) {
           auto& options = training->optimizer().param_groups()[0].options();
           static_cast<torch::optim::SGDOptions&>(options).momentum(0.2 * step);
           train(bench, *training, step, step + 1);
         }
         bench.same_parameters(*model);
       }},
      {"schedule_of_torch",
       [](Bench& bench) {
         scheduled(
             bench, [](auto& optimizer) { return torch::optim::StepLR(optimizer, 2, 0.5); },
             [](auto& schedule, int64_t) { schedule.step(); });
       }},
      {"schedule_of_torch_on_a_plateau",
       [](Bench& bench) {
         scheduled(
             bench,
             [](auto& optimizer) {
               return torch::optim::ReduceLROnPlateauScheduler(optimizer, torch::optim::ReduceLROnPlateauScheduler::min,
                                                               0.5f, 1);
             },
             [](auto& schedule, int64_t) { schedule.step(1.0f); });
       }},
      {"schedule_of_shoal",
       [](Bench& bench) {
         scheduled(
             bench, [](auto& optimizer) { return LinearWarmup(optimizer, 3); },
             [](auto& schedule, int64_t) { schedule.step(); });
       }},
  };
}

}  // namespace shoal::test
