#include "cli/strategies/schedules.h"

#include <fmt/format.h>

#include <cmath>
#include <optional>

#include "shoal/error.h"

namespace shoal::cli {
namespace {

constexpr double start_factor = 1e-3;  // fraction of the learning rate at the first step of a warm-up
constexpr double usual_decay = 0.1;

template <class T>
void refuse(const char* option, const std::optional<T>& value, const TrainOptions& options, const char* schedules) {
  if (!value) return;
  throw UsageError(fmt::format("{} {}: is for --schedule {}, not {}", option, *value, schedules, options.schedule));
}

OneCycleOptions one_cycle(const TrainOptions& options, int64_t total_steps) {
  OneCycleOptions cycle{.total_steps = total_steps};
  // The rate reaches its full value at the step after the warm-up.
  if (options.warmup_steps) {
    cycle.rising = static_cast<double>(*options.warmup_steps + 1) / static_cast<double>(total_steps);
  }
  return cycle;
}

void check_length(const TrainOptions& options, int64_t total_steps) {
  const auto warmup = options.warmup_steps.value_or(0);
  if (options.schedule == "cosine" && warmup >= total_steps) {
    throw UsageError(
        fmt::format("--warmup-steps {}: give fewer than the {} steps of the training", warmup, total_steps));
  }
  if (options.schedule != "one_cycle") return;
  const auto rising = one_cycle(options, total_steps).rising * static_cast<double>(total_steps);
  if (rising > 1 && rising < static_cast<double>(total_steps)) return;
  throw UsageError(fmt::format(
      "--schedule one_cycle: {} steps cannot rise and fall{}; give at least 4, and --warmup-steps from 1 to steps - 2",
      total_steps, options.warmup_steps ? fmt::format(" with --warmup-steps {}", warmup) : ""));
}

}  // namespace

std::vector<std::string> schedule_names() {
  return {"constant", "linear_warmup", "cosine", "one_cycle", "step"};
}

void check_schedule(const TrainOptions& options) {
  const auto& name = options.schedule;
  if (name == "constant" || name == "step") {
    refuse("--warmup-steps", options.warmup_steps, options, "linear_warmup, cosine and one_cycle");
  }
  if (name != "step") {
    refuse("--decay-every", options.decay_every, options, "step");
    refuse("--decay-factor", options.decay_factor, options, "step");
  }
  if (options.warmup_steps && *options.warmup_steps < 0) {
    throw UsageError(fmt::format("--warmup-steps {}: give at least 0", *options.warmup_steps));
  }
  if (name == "linear_warmup" && !options.warmup_steps) {
    throw UsageError("--schedule linear_warmup needs --warmup-steps N");
  }
  if (name == "step" && !options.decay_every) throw UsageError("--schedule step needs --decay-every N");
  if (options.decay_every && *options.decay_every < 1) {
    throw UsageError(fmt::format("--decay-every {}: give at least 1", *options.decay_every));
  }
  if (options.decay_factor && !(*options.decay_factor > 0 && *options.decay_factor <= 1)) {
    throw UsageError(fmt::format("--decay-factor {}: give a number above 0, up to 1", *options.decay_factor));
  }
  if (options.steps) check_length(options, *options.steps);
}

std::unique_ptr<LambdaLR> make_schedule(const TrainOptions& options, torch::optim::Optimizer& optimizer,
                                        int64_t total_steps) {
  check_length(options, total_steps);
  if (options.schedule == "linear_warmup") {
    return std::make_unique<LinearWarmup>(optimizer, *options.warmup_steps, start_factor);
  }
  if (options.schedule == "cosine") {
    return std::make_unique<CosineWithWarmup>(optimizer,
                                              CosineWithWarmupOptions{.total_steps = total_steps,
                                                                      .warmup_steps = options.warmup_steps.value_or(0),
                                                                      .start_factor = start_factor});
  }
  if (options.schedule == "one_cycle") return std::make_unique<OneCycle>(optimizer, one_cycle(options, total_steps));
  if (options.schedule == "step") {
    // As Python's StepLR; libtorch's decays one step late.
    return std::make_unique<LambdaLR>(
        optimizer, [every = *options.decay_every, factor = options.decay_factor.value_or(usual_decay)](int64_t step) {
          return std::pow(factor, static_cast<double>(step / every));
        });
  }
  return nullptr;
}

}  // namespace shoal::cli
