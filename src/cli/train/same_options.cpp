#include "cli/train/same_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
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

std::vector<std::string> lines_of(const TrainOptions& options, std::optional<size_t> samples) {
  std::vector<std::string> lines{fmt::format("--model {}", options.model),
                                 fmt::format("--size {}", options.size),
                                 fmt::format("--data {}", options.data.substr(0, options.data.find(':'))),
                                 samples ? fmt::format("--data with {} samples", *samples) : "endless --data",
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
  const std::set<std::string> own{"topology_file", "neighbour_timeout"};
  for (const auto& [name, value] : options.strategy_options) {
    auto option = "--" + name;
    std::replace(option.begin(), option.end(), '_', '-');
    lines.push_back(own.contains(name) ? whether(option.c_str(), true) : fmt::format("{} {}", option, value));
  }
  return lines;
}

}  // namespace

void require_same_options(const TrainOptions& options, std::optional<size_t> samples, const Group& group) {
  if (group.size() == 1 || options.chosen().pace == Pace::alone) return;
  agree(group, "options of shoal train, which must be the same on all ranks", lines_of(options, samples));
}

}  // namespace shoal::cli
