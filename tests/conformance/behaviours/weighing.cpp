// Unequal parts of a batch (weights, Join), and the scale of the loss.

#include <cmath>
#include <limits>

#include "shoal/join.h"
#include "tests/conformance/behaviours.h"

namespace shoal::test {
namespace {

Setup with_scaler(double scale = 1024) {
  Setup setup;
  setup.optimizer = torch::optim::SGDOptions(0.1);
  setup.scaler = GradScalerOptions{.initial_scale = scale, .growth_interval = 2, .hysteresis = 1};
  return setup;
}

constexpr double half_precision = 3e-2;

// Training in float16; in step `broken`, the rank's gradient has an infinity.
void scaled(Bench& bench, const Setup& setup, int64_t broken, int rank) {
  auto model = perceptron();
  auto training = bench.wrap(model, setup);
  for (int64_t step = 0; step < 4; ++step) {
    training->zero_grad();
    auto loss = loss_of(training->forward(bench.batch(step).to(at::kFloat)).to(at::kFloat));
    if (step == broken && bench.on(rank)) loss = loss * std::numeric_limits<float>::infinity();
    training->scale(loss).backward();
    const bool updated = training->step();
    bench.same("updated", updated);
    bench.same("scale", training->loss_scale());
  }
  bench.same_parameters(*model, half_precision);
}

// Rows of a part if part n has n + 1 rows in each step.
at::Tensor uneven(const Bench& bench, int64_t step, int part) {
  return rows(100 * step + part, {part + 1, 6}).to(at::kDouble);
}

// Sums of losses over unequal numbers of rows, divided by the total number.
void weighted(Bench& bench, int64_t micros) {
  auto model = perceptron();
  auto training = bench.wrap(model);
  for (int64_t step = 0; step < 3; ++step) {
    training->zero_grad();
    for (int64_t micro = 0; micro < micros; ++micro) {
      const auto local = training->no_sync(micro + 1 < micros);
      if (bench.one_process()) {
        double samples = 0;
        at::Tensor sum = at::zeros({}, at::kDouble);
        for (int part = 0; part < bench.parts(); ++part) {
          const auto x = uneven(bench, 10 * step + micro, part);
          sum = sum + training->forward(x).pow(2).sum();
          samples += static_cast<double>(x.size(0));
        }
        training->backward(sum, samples * static_cast<double>(micros));
      } else {
        const auto x = uneven(bench, 10 * step + micro, bench.part().number);
        training->backward(training->forward(x).pow(2).sum(), static_cast<double>(x.size(0)));
      }
    }
    training->step();
  }
  bench.same_parameters(*model);
}

// The same through two models with a wrapper each; the weight is given to the second one.
void weighted_through_two(Bench& bench, int64_t micros) {
  auto lower = perceptron(1), upper = perceptron(2);
  auto first = bench.wrap(lower), second = bench.wrap(upper);
  const auto output = [&](const at::Tensor& x) {
    return second->forward(at::cat({first->forward(x), x.narrow(1, 0, 3)}, 1));
  };
  for (int64_t step = 0; step < 3; ++step) {
    first->zero_grad();
    second->zero_grad();
    for (int64_t micro = 0; micro < micros; ++micro) {
      const auto one_local = first->no_sync(micro + 1 < micros);
      const auto other_local = second->no_sync(micro + 1 < micros);
      at::Tensor sum = at::zeros({}, at::kDouble);
      double samples = 0;
      for (int part = 0; part < bench.parts(); ++part) {
        if (!bench.one_process() && part != bench.part().number) continue;
        const auto x = uneven(bench, 10 * step + micro, part);
        sum = sum + output(x).pow(2).sum();
        samples += static_cast<double>(x.size(0));
      }
      second->backward(sum, bench.one_process() ? samples * static_cast<double>(micros) : samples);
    }
    first->step();
    second->step();
  }
  bench.same_parameters(*lower);
  bench.same_parameters(*upper);
}

}  // namespace

void train_joined(Bench& bench, const std::shared_ptr<Network>& model) {
  auto training = bench.wrap(model);
  const auto rows_of = [&](int64_t step, int part) { return rows(1000 * (part + 1) + step, {4, 6}); };
  if (bench.one_process()) {
    for (int64_t step = 0; step < bench.parts() + 1; ++step) {
      training->zero_grad();
      for (int part = 0; part < bench.parts(); ++part) {
        if (step < part + 2) (loss_of(training->forward(rows_of(step, part))) / bench.parts()).backward();
      }
      training->step();
    }
    bench.same_parameters(*model);
    return;
  }
  Join join({training->joinable()});
  for (int64_t step = 0; join.next(step < bench.part().number + 2); ++step) {
    training->zero_grad();
    if (join.active()) {
      loss_of(training->forward(rows_of(step, bench.part().number))).backward();
    } else {
      training->joinable().shadow();
    }
    training->step();
  }
  bench.same_parameters(*model);
}

Behaviours weighing() {
  return {
      {"unequal_shares_with_weights", [](Bench& bench) { weighted(bench, 1); }},
      {"unequal_shares_with_weights_accumulated", [](Bench& bench) { weighted(bench, 2); }},
      {"unequal_shares_with_weights_in_two_wrappers", [](Bench& bench) { weighted_through_two(bench, 1); }},
      {"unequal_shares_with_weights_in_two_wrappers_accumulated", [](Bench& bench) { weighted_through_two(bench, 2); }},
      {"unequal_numbers_of_batches", [](Bench& bench) { train_joined(bench, perceptron()); }},
      {"a_loss_scale", [](Bench& bench) { scaled(bench, with_scaler(), -1, 0); }},
      {"a_loss_scale_with_inf_on_all_ranks",
       [](Bench& bench) {
         auto setup = with_scaler();
         auto model = perceptron();
         auto training = bench.wrap(model, setup);
         for (int64_t step = 0; step < 4; ++step) {
           training->zero_grad();
           auto loss = loss_of(training->forward(bench.batch(step).to(at::kFloat)).to(at::kFloat));
           if (step == 1) loss = loss * std::numeric_limits<float>::infinity();
           training->scale(loss).backward();
           bench.same("updated", training->step());
         }
         bench.same("scale", training->loss_scale());
         bench.same_parameters(*model, half_precision);
       }},
      {"a_loss_scale_with_inf_on_one_rank", [](Bench& bench) { scaled(bench, with_scaler(), 1, 1); }},
      {"a_loss_scale_with_clipping",
       [](Bench& bench) {
         auto setup = with_scaler();
         setup.clip = 0.05;
         scaled(bench, setup, -1, 0);
       }},
      {"a_loss_scale_with_accumulation",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model, with_scaler());
         for (int64_t step = 0; step < 3; ++step) {
           training->zero_grad();
           for (int64_t micro = 0; micro < 2; ++micro) {
             const auto local = training->no_sync(micro == 0);
             const auto output = training->forward(bench.batch(10 * step + micro).to(at::kFloat)).to(at::kFloat);
             training->scale(loss_of(output) / 2).backward();
           }
           bench.same("updated", training->step());
         }
         bench.same_parameters(*model, half_precision);
       }},
      {"a_loss_that_is_not_a_number_is_seen",
       [](Bench& bench) {
         auto model = perceptron();
         auto training = bench.wrap(model);
         train(bench, *training, 0, 2);
         training->zero_grad();
         auto loss = loss_of(training->forward(bench.batch(2)));
         const bool bad = !(loss * NAN).isfinite().item<bool>();
         if (!bad) loss.backward();  // all ranks skip it
         training->step();
         train(bench, *training, 3, 4);
         bench.same_parameters(*model);
       }},
  };
}

}  // namespace shoal::test
