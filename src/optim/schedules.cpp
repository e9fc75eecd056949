#include "shoal/schedules.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "optim/faults.h"

namespace shoal {
namespace {

// Value between `start` (part 0) and `end` (part 1).
double anneal(Anneal curve, double start, double end, double part) {
  if (curve == Anneal::linear) return start + (end - start) * part;
  return end + (start - end) / 2 * (1 + std::cos(std::numbers::pi * part));
}

double warm_up(int64_t step, int64_t steps, double start_factor) {
  if (step >= steps) return 1;
  return anneal(Anneal::linear, start_factor, 1, static_cast<double>(step) / static_cast<double>(steps));
}

LambdaLR::Factor linear_warmup(int64_t steps, double start_factor) {
  Faults("LinearWarmup")
      .require(steps >= 0, "warmup_steps", static_cast<double>(steps), "0 or a positive number")
      .require(start_factor > 0 && start_factor <= 1, "start_factor", start_factor, "a number above 0, up to 1")
      .raise();
  return [=](int64_t step) { return warm_up(step, steps, start_factor); };
}

LambdaLR::Factor cosine_with_warmup(const CosineWithWarmupOptions& options) {
  options.validate();
  return [options](int64_t step) {
    if (step < options.warmup_steps) return warm_up(step, options.warmup_steps, options.start_factor);
    const auto done = std::min(step, options.total_steps) - options.warmup_steps;
    const auto all = options.total_steps - options.warmup_steps;
    return anneal(Anneal::cosine, 1, options.final_factor, static_cast<double>(done) / static_cast<double>(all));
  };
}

struct Phase {
  double end_step, start, end;  // factors of the learning rate
};

LambdaLR::Factor one_cycle(const OneCycleOptions& options) {
  options.validate();
  const auto total = static_cast<double>(options.total_steps);
  const double initial = 1 / options.initial_divisor, final = initial / options.final_divisor;
  // As in Python: the rate peaks at this step, which need not be an integer.
  const double peak = options.rising * total - 1;
  std::vector<Phase> phases{{peak, initial, 1}};
  if (options.three_phase) phases.push_back({2 * peak, 1, initial});
  phases.push_back({total - 1, phases.back().end, final});
  return [phases, curve = options.anneal](int64_t step) {
    const double at = std::min(static_cast<double>(step), phases.back().end_step);
    const auto phase = std::find_if(phases.begin(), phases.end(), [&](const Phase& p) { return at <= p.end_step; });
    const double start_step = phase == phases.begin() ? 0 : std::prev(phase)->end_step;
    return anneal(curve, phase->start, phase->end, (at - start_step) / (phase->end_step - start_step));
  };
}

}  // namespace

void CosineWithWarmupOptions::validate() const {
  Faults("CosineWithWarmup")
      .require(total_steps > 0, "total_steps", static_cast<double>(total_steps), "steps above 0")
      .require(warmup_steps >= 0 && warmup_steps < std::max<int64_t>(total_steps, 1), "warmup_steps",
               static_cast<double>(warmup_steps), "0 or a positive number below total_steps")
      .require(start_factor > 0 && start_factor <= 1, "start_factor", start_factor, "a number above 0, up to 1")
      .require(final_factor >= 0 && final_factor <= 1, "final_factor", final_factor, "a number from 0 to 1")
      .raise();
}

void OneCycleOptions::validate() const {
  Faults("OneCycle")
      .require(total_steps >= 2, "total_steps", static_cast<double>(total_steps), "at least 2 steps")
      .require(rising < 1 && rising * static_cast<double>(total_steps) > 1 && !(three_phase && rising > 0.5), "rising",
               rising, "a part below 1, or up to 0.5 with three phases, that is more than one step")
      .require(initial_divisor > 0, "initial_divisor", initial_divisor, "a positive number")
      .require(final_divisor > 0, "final_divisor", final_divisor, "a positive number")
      .raise();
}

LambdaLR::LambdaLR(torch::optim::Optimizer& optimizer, Factor factor)
    : LRScheduler(optimizer), factor_(std::move(factor)), base_rates_(get_current_lrs()) {
  set_position(0);
}

int64_t LambdaLR::position() const {
  return static_cast<int64_t>(step_count_) - 1;
}

void LambdaLR::set_position(int64_t position) {
  Faults("LambdaLR")
      .require(position >= 0, "position", static_cast<double>(position), "0 or a positive number")
      .raise();
  step_count_ = static_cast<unsigned>(position);
  step();
}

LambdaLR::LambdaLR(torch::optim::Optimizer& optimizer, const LambdaLR& other)
    : LRScheduler(optimizer), factor_(other.factor_), base_rates_(other.base_rates_) {
  Faults("LambdaLR")
      .require(optimizer.param_groups().size() == base_rates_.size(), "param groups",
               static_cast<double>(optimizer.param_groups().size()),
               fmt::format("an optimizer with {}, as the schedule's own has", base_rates_.size()).c_str())
      .raise();
  set_position(other.position());
}

std::unique_ptr<LambdaLR> LambdaLR::on(torch::optim::Optimizer& optimizer) const {
  return std::unique_ptr<LambdaLR>(new LambdaLR(optimizer, *this));
}

std::vector<double> LambdaLR::get_lrs() {
  auto rates = base_rates_;
  for (auto& rate : rates) rate *= factor_(step_count_);
  return rates;
}

LinearWarmup::LinearWarmup(torch::optim::Optimizer& optimizer, int64_t warmup_steps, double start_factor)
    : LambdaLR(optimizer, linear_warmup(warmup_steps, start_factor)) {}

CosineWithWarmup::CosineWithWarmup(torch::optim::Optimizer& optimizer, const CosineWithWarmupOptions& options)
    : LambdaLR(optimizer, cosine_with_warmup(options)) {}

OneCycle::OneCycle(torch::optim::Optimizer& optimizer, const OneCycleOptions& options)
    : LambdaLR(optimizer, one_cycle(options)) {}

}  // namespace shoal
