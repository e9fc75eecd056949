#include "cli/train/checkpoints.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "base/print_to_stderr.h"
#include "base/printable.h"
#include "cli/exit_code.h"
#include "cli/train/earlier_run.h"
#include "engine/checkpoint/training_state.h"
#include "shoal/error.h"

namespace shoal::cli {
namespace {

// Keys in the position of a checkpoint.
constexpr const char* steps_per_epoch = "steps_per_epoch";
constexpr const char* seed_of_order = "seed";
constexpr const char* samples_of_data = "samples";

// Where the samples that come now are not those that would have come.
std::vector<std::string> other_samples(const nlohmann::json& position, const TrainOptions& options,
                                       std::optional<size_t> samples, bool in_epoch) {
  std::vector<std::string> lines;
  const auto compare = [&](const char* key, const char* what, const nlohmann::json& now) {
    if (!position.is_object() || !position.contains(key) || position[key] == now) return;
    lines.push_back(fmt::format("{} {}, in the checkpoint {}: samples come in another order{}", what, now.dump(),
                                position[key].dump(),
                                in_epoch ? ", so that this epoch takes some of them twice and others not" : ""));
  };
  compare(seed_of_order, "--seed is", options.seed);
  if (samples) compare(samples_of_data, "samples of --data are", *samples);
  return lines;
}

// The checkpoint's step in the present number of steps per epoch, because ranks or batches may have changed.
int64_t converted(const Loaded& loaded, const nlohmann::json& position, int64_t per_epoch) {
  if (!position.is_object() || !position.contains(steps_per_epoch)) return loaded.step;
  const auto& stored = position[steps_per_epoch];
  const auto before = stored.is_number_integer() ? stored.get<int64_t>() : 0;
  int64_t product = 0;
  if (before > 0 && !__builtin_mul_overflow(loaded.step, per_epoch, &product)) return product / before;
  throw UsageError(
      fmt::format("--resume {}: step {} of {} steps per epoch, as its position says, cannot be: the position was not "
                  "written by shoal train",
                  loaded.path.string(), loaded.step, printable(stored.dump())));
}

}  // namespace

void Checkpoints::take_state(TrainingCore& training, LambdaLR* schedule) {
  state_.reset();
  if (options_.save.empty() && options_.resume.empty()) return;
  auto state = training.state();
  if (!state) return;
  state_.emplace(std::move(*state));
  if (schedule != nullptr) state_->with(*schedule);
}

void Checkpoints::leave_state() {
  wait();
  state_.reset();
}

void Checkpoints::wait() {
  if (state_) state_->wait();
}

int64_t Checkpoints::resume(int64_t total_steps, LambdaLR* schedule, bool says) {
  if (options_.resume.empty()) return 0;
  if (options_.partial) {
    const auto found = load(options_.resume, *state_, {.partial = true});
    if (says) print_to_stderr("starting with what {} has of the model\n", found.path.string());
    return 0;
  }
  // The command line, not the checkpoint, defines the options of param groups.
  const LoadOptions how{.rates = false, .options = false};
  const auto found =
      options_.resume_if_any ? load_latest(options_.resume, *state_, how) : load(options_.resume, *state_, how);
  if (!found) {
    if (says) print_to_stderr("{} has no checkpoint yet: starting at step 0\n", options_.resume);
    return 0;
  }
  const auto& loaded = *found;
  const auto position = nlohmann::json::parse(loaded.position, nullptr, /*allow_exceptions=*/false);
  const auto per_epoch = feed_.steps_per_epoch();
  const auto first = per_epoch ? converted(loaded, position, *per_epoch) : loaded.step;
  if (first >= total_steps && options_.resume_if_any) {
    if (says) {
      print_to_stderr("{}: this training of {} steps is done; for more, give more steps or epochs\n",
                      loaded.path.string(), total_steps);
    }
    return first;
  }
  if (first >= total_steps) {
    throw UsageError(fmt::format(
        "--resume {}: the checkpoint is from step {}, but training ends after step {}; give more steps or epochs",
        loaded.path.string(), first, total_steps));
  }
  // The schedules' own counts are in steps of the ranks that they began with.
  if (schedule != nullptr) schedule->set_position(first);
  set_own_schedules(*state_, first);
  if (says) {
    print_to_stderr("going on after step {} of {}{}\n", first, loaded.path.string(),
                    loaded.exact ? "" : fmt::format(" ({} at {} ranks)", printable(loaded.strategy), loaded.ranks));
    for (const auto& difference : loaded.differences) print_to_stderr("{}\n", difference);
    const bool in_epoch = per_epoch && first % *per_epoch != 0;
    for (const auto& line : other_samples(position, options_, feed_.samples(), in_epoch)) print_to_stderr("{}\n", line);
  }
  return first;
}

void Checkpoints::begin_anew() {
  if (!options_.save.empty()) earlier_latest_ = latest_step(options_.save);
}

bool Checkpoints::is_due(int64_t steps) const {
  return state_ && options_.save_every > 0 && steps % options_.save_every == 0;
}

SaveOptions Checkpoints::how_to_save(int64_t steps) const {
  nlohmann::json position = nlohmann::json::object();
  if (const auto per_epoch = feed_.steps_per_epoch()) position[steps_per_epoch] = *per_epoch;
  position[seed_of_order] = options_.seed;
  if (const auto samples = feed_.samples()) position[samples_of_data] = *samples;
  return {.step = steps, .position = position.dump(), .keep_last = options_.keep_last};
}

void Checkpoints::save(int64_t steps) {
  shoal::save(options_.save, *state_, how_to_save(steps));
}

void Checkpoints::save_in_background(int64_t steps) {
  const auto how = how_to_save(steps);
  earlier_latest_.reset();
  save_async(options_.save, *state_, how);
}

std::string Checkpoints::keep_earlier_latest(int64_t steps, bool leads) const {
  if (!earlier_latest_ || *earlier_latest_ <= steps) return "";
  if (leads && !name_latest_again(options_.save, *earlier_latest_)) {
    print_to_stderr("--save {}: latest is step-{} now, and no longer step-{} of an earlier run\n", options_.save, steps,
                    *earlier_latest_);
    return "";
  }
  return fmt::format("step-{}", *earlier_latest_);
}

}  // namespace shoal::cli
