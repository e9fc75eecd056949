#include "cli/train/train_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/limits.h"
#include "cli/strategies/optimizers.h"
#include "cli/strategies/schedules.h"
#include "cli/strategies/strategy_options.h"
#include "cli/strategies/units.h"
#include "cli/train/device.h"
#include "cli/train/require.h"
#include "comm/transport/transport.h"
#include "models/registry.h"
#include "shoal/error.h"

namespace shoal::cli {
namespace {

void complete_saving(TrainOptions& options) {
  require_at_least<int64_t>("--save-every", options.save_every, 0);
  require_at_least<int64_t>("--keep-last", options.keep_last, 0);
  if (options.save_every > 0 && options.save.empty()) throw UsageError("--save-every needs --save DIR");
  if (options.keep_last > 0 && options.save.empty()) throw UsageError("--keep-last needs --save DIR");
  if (options.resume == "latest") {
    if (options.save.empty()) throw UsageError("--resume latest needs --save DIR: it is the latest checkpoint there");
    options.resume = options.save;
    options.resume_if_any = !options.partial;
  }
  if (options.partial && options.resume.empty()) throw UsageError("--partial needs --resume PATH");
  if (options.chosen().synchronization != Synchronization::independent) return;
  for (const auto& [option, given] :
       {std::pair("--save-every", options.save_every > 0), std::pair("--keep-last", options.keep_last > 0),
        std::pair("--resume", !options.resume.empty())}) {
    if (!given) continue;
    throw UsageError(
        fmt::format("{}: --strategy {} has no checkpoints, because its ranks do not communicate; --save DIR alone "
                    "saves a model at the end",
                    option, options.strategy));
  }
}

// Every option must belong to one of the strategies; each is checked on its own.
void check_course(const TrainOptions& options) {
  const auto course = options.course();
  if (options.steps && course.back().first >= *options.steps) {
    throw UsageError(fmt::format("--replan {}: training ends after step {}", options.replan, *options.steps));
  }
  if (course.size() == 1) return in_words_of_the_command_line([&] { options.values(); });
  for (const auto& option : options.strategy_options) {
    const bool known = std::any_of(course.begin(), course.end(),
                                   [&](const auto& entry) { return find_strategy(entry.second).has(option.first); });
    if (!known) in_words_of_the_command_line([&] { option_values(options.chosen(), {option}); });
  }
  for (const auto& [step, name] : course) {
    const auto under = options.under(name);
    in_words_of_the_command_line([&] { under.values(); });
    if (find_strategy(name).synchronization == Synchronization::lockstep) continue;
    throw UsageError(fmt::format(
        "--replan: ranks of {} do not make every step together; it is for strategies whose ranks do", name));
  }
}

void check_dtype(const TrainOptions& options) {
  require_one_of("--dtype", options.dtype, precision_names());
  for (const auto& [step, name] : options.course()) {
    try {
      precision_of(name, options.dtype);
    } catch (const UsageError& error) {
      const bool several = options.course().size() > 1;
      throw UsageError(
          fmt::format("--dtype {}{}", error.what(), several ? "; with --replan, all can take bf16_mixed" : ""));
    }
  }
}

}  // namespace

std::vector<std::pair<int64_t, std::string>> TrainOptions::course() const {
  std::vector<std::pair<int64_t, std::string>> list{{0, strategy}};
  const auto refuse = [&] {
    throw UsageError(
        fmt::format("--replan {}: give STEP:STRATEGY[,STEP:STRATEGY...] with ascending steps from 1", replan));
  };
  for (size_t begin = 0; !replan.empty() && begin <= replan.size();) {
    const auto end = std::min(replan.find(',', begin), replan.size());
    const auto colon = replan.find(':', begin);
    if (colon == std::string::npos || colon > end) refuse();
    int64_t step = 0;
    const auto [rest, error] = std::from_chars(replan.data() + begin, replan.data() + colon, step);
    if (error != std::errc() || rest != replan.data() + colon || step <= list.back().first) refuse();
    list.emplace_back(step, replan.substr(colon + 1, end - colon - 1));
    require_one_of("--replan", list.back().second, strategy_names());
    begin = end + 1;
  }
  return list;
}

TrainOptions TrainOptions::under(const std::string& name) const {
  auto options = *this;
  options.strategy = name;
  return options;
}

void TrainOptions::complete() {
  require_one_of("--strategy", strategy, strategy_names());
  require_one_of("--transport", transport, transport_names());
  require_one_of("--optimizer", optimizer, optimizer_names());
  require_one_of("--schedule", schedule, schedule_names());
  check_dtype(*this);
  if (ranks) {
    require_at_least("--ranks", *ranks, 1);
    require_at_most("--ranks", *ranks, max_ranks);
  }
  if (chosen().synchronization == Synchronization::single_rank && ranks && *ranks != 1) {
    throw UsageError(fmt::format("--strategy {} trains in one process: --ranks {} is not possible", strategy, *ranks));
  }
  require_at_least("--threads", threads, 0);
  require_at_most("--threads", threads, max_threads);
  require_at_least("--accumulate", accumulate, 1);
  require_at_least("--timeout", timeout_seconds, 1);
  if (steps) require_at_least<int64_t>("--steps", *steps, 1);
  if (epochs) require_at_least("--epochs", *epochs, 1);
  if (steps && epochs) throw UsageError("--steps and --epochs exclude each other: give one of them");
  if (lr && !(*lr > 0 && std::isfinite(*lr))) throw UsageError(fmt::format("--lr {}: give a number above 0", *lr));
  complete_saving(*this);
  const bool known = data == "fashion-mnist" || data.rfind("fashion-mnist:", 0) == 0 || reference_data() || text_data();
  if (!known)
    throw UsageError(fmt::format("--data {}: fashion-mnist, fashion-mnist:FOLDER, reference or text:FILE", data));
  models::require_model(model, size);
  if (text_data() && model != "gpt") throw UsageError(fmt::format("--data text: requires --model gpt, not {}", model));
  if (!text_data() && !reference_data() && model == "gpt") {
    throw UsageError("--model gpt reads bytes: give --data text:FILE or reference");
  }
  if (reference_data() && epochs) throw UsageError("--epochs: reference data has no end; give --steps");
  if (reference_data() && eval) throw UsageError("--eval: reference data has no test set");
  if (init.empty()) init = reference_data() ? "reference" : "torch";
  require_one_of("--init", init, {"torch", "reference"});
  if (reference_data() && !steps) steps = 10;
  if (!reference_data() && !steps && !epochs) epochs = 1;
  check_optimizer(*this);
  check_schedule(*this);
  if (batch == 0) batch = reference_data() ? 4 : 64;
  if (!(clip >= 0)) throw UsageError(fmt::format("--clip {}: give a norm, or 0 for none", clip));
  check_logging_data(*this);
  check_course(*this);
  check_device(device);
  check_elastic(*this);
}

void TrainOptions::check_strategy(int on_ranks, std::optional<int> hosts) const {
  for (const auto& [step, name] : course()) {
    const auto under = this->under(name);
    const auto& check = under.chosen().check;
    if (!check) continue;
    in_words_of_the_command_line([&] { check(under.values(), under.training_options(), on_ranks, hosts); });
  }
}

std::string TrainOptions::compress() const {
  return chosen().has("compress") ? values().text("compress") : "none";
}

TrainingOptions TrainOptions::training_options() const {
  TrainingOptions training{.options = strategy_options,
                           .clip_grad = clip,
                           .precision = precision(),
                           .units = unit_policy(model),
                           .seed = seed};
  if (!replan.empty()) {
    std::erase_if(training.options, [this](const auto& entry) { return !chosen().has(entry.first); });
  }
  const bool wide = chosen().main_copies && dtype.ends_with("_mixed") && chosen().has("grad_reduce_in_fp32");
  if (wide) training.options.try_emplace("grad_reduce_in_fp32", "true");
  return training;
}

}  // namespace shoal::cli
