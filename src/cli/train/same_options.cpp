#include "cli/train/same_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <vector>

namespace shoal::cli {
namespace {

// A path may be another one on each host; whether there is one decides which collectives a rank calls.
std::string whether(const char* option, bool given) {
  return fmt::format("{}{}", given ? "" : "no ", option);
}

template <class T>
std::string maybe(const char* option, const std::optional<T>& value) {
  return value ? fmt::format("{} {}", option, *value) : whether(option, false);
}

// Of a strategy: with the defaults, so that the value that an option has without being given is the same.
std::string line_of(const StrategyOption& option, const OptionValues& values) {
  auto name = "--" + option.name;
  std::replace(name.begin(), name.end(), '_', '-');
  if (option.name == "topology_file") return whether(name.c_str(), !values.text(option.name).empty());
  if (option.type == StrategyOption::Type::number && !values.text(option.name).empty()) {
    return fmt::format("{} {}", name, values.number(option.name));
  }
  return fmt::format("{} {}", name, values.text(option.name));
}

std::vector<std::string> lines_of(const TrainOptions& options, const Feed& feed) {
  // They follow from --batch and --data, of which each host may have its own, and from them schedules, evaluations and
  // the end.
  const bool counts =
      options.chosen().synchronization != Synchronization::asynchronous && (options.epochs || options.eval);
  const auto steps = counts ? feed.steps_per_epoch() : std::nullopt;
  std::vector<std::string> lines{
      fmt::format("--model {}", options.model),
      fmt::format("--size {}", options.size),
      fmt::format("--data {}", options.data.substr(0, options.data.find(':'))),
      steps ? fmt::format("--batch and --data that make {} steps per epoch", *steps) : "any --batch",
      fmt::format("--init {}", options.init),
      fmt::format("--strategy {}", options.strategy),
      fmt::format("--replan {}", options.replan),
      maybe("--elastic", options.elastic),
      whether("--keep-global-batch", options.keep_global_batch),
      fmt::format("--optimizer {}", options.optimizer),
      maybe("--lr", options.lr),
      maybe("--accum-iter", options.accum_iter),
      fmt::format("--schedule {}", options.schedule),
      maybe("--warmup-steps", options.warmup_steps),
      maybe("--decay-every", options.decay_every),
      maybe("--decay-factor", options.decay_factor),
      fmt::format("--accumulate {}", options.accumulate),
      maybe("--steps", options.steps),
      maybe("--epochs", options.epochs),
      fmt::format("--dtype {}", options.dtype),
      fmt::format("--clip {}", options.clip),
      fmt::format("--seed {}", options.seed),
      whether("--eval", options.eval),
      whether("--save", !options.save.empty()),
      fmt::format("--save-every {}", options.save_every),
      whether("--resume", !options.resume.empty()),
      whether("--partial", options.partial),
      whether("--trace", !options.trace.empty())};
  const auto values = options.values();
  for (const auto& option : options.chosen().options) {
    if (option.name != "neighbour_timeout") lines.push_back(line_of(option, values));
  }
  return lines;
}

}  // namespace

void require_same_options(const TrainOptions& options, const Feed& feed, const Group& group) {
  if (group.size() == 1 || options.chosen().synchronization == Synchronization::independent) return;
  agree(group, "options of shoal train, which must be the same on all ranks", lines_of(options, feed));
}

}  // namespace shoal::cli
