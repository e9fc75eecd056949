// Change of strategy, precision and ranks of a training between two steps.

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/loading/memory_source.h"
#include "checkpoint/on_all_ranks.h"
#include "engine/checkpoint/training_state.h"
#include "engine/gradients/backward_tracker.h"
#include "engine/wrapper/logging.h"
#include "module/walk.h"
#include "optim/named_options.h"
#include "shoal/deferred_init.h"
#include "shoal/detail/clock.h"
#include "training/parts.h"
#include "training/released_module.h"

namespace shoal {

// Functions of TrainingCore that only replan() calls.
class ReplanAccess {
 public:
  static void abandon_failed_step(TrainingCore& core) { core.abandon_failed_step(); }
  static std::string open_scope(const TrainingCore& core) { return core.open_scope(); }
  static bool updates_in_backward(const TrainingCore& core) { return core.updates_in_backward(); }
};

namespace {

constexpr const char* replan_subject = "replan";

// One line per argument, for agree().
std::vector<std::string> arguments_of(const std::string& strategy, const OptimizerRecipe& recipe,
                                      const TrainingOptions& options) {
  std::vector<std::string> lines{
      fmt::format("strategy {}", strategy),
      recipe.defaults ? fmt::format("optimizer with {}: {}", type_of(*recipe.defaults), describe(*recipe.defaults))
                      : "",
      fmt::format("clip_grad {}", options.clip_grad),
      in_words(options.precision),
      options.units ? "units" : "no units",
      options.schedule ? "a schedule" : "no schedule",
      fmt::format("seed {}", options.seed),
      fmt::format("ignored {}", fmt::join(options.ignored, ", ")),
      options.communication_hook ? options.communication_hook->name() : "no communication hook"};
  for (const auto& [name, value] : options.options) lines.push_back(fmt::format("{} {}", name, value));
  return lines;
}

// Place of a rank in the training before, or after.
struct Place {
  int rank = -1;  // -1: none
  int size = 0;
};

Place place_in(const std::optional<Group>& group) {
  return group ? Place{group->rank(), group->size()} : Place();
}

// Number of ranks that have a place. UsageError unless all ranks of one group are there.
int ranks_of(const std::vector<Place>& places, const char* which, const Group& job) {
  int size = 0;
  int found = 0;
  std::vector<bool> taken;
  for (const auto& place : places) {
    if (place.rank < 0) continue;
    size = std::max(size, place.size);
    taken.resize(static_cast<size_t>(size));
    const bool alike = place.size == size && !taken[place.rank];
    if (!alike) throw UsageError(fmt::format("replan: ranks have different groups {} the change", which));
    taken[place.rank] = true;
    ++found;
  }
  if (found == size && size > 0) return size;
  throw UsageError(
      fmt::format("replan: the group {} the change has {} ranks, of which {} are among the {} that call it; `job` "
                  "must contain all of them",
                  which, size, found, job.size()));
}

// One call of replan() on one rank.
class Change {
 public:
  Change(std::unique_ptr<TrainingCore>& core, const std::shared_ptr<torch::nn::Module>& module,
         const std::optional<Group>& group, const Group& job)
      : core_(core), module_(module), after_(group), job_(job) {
    if (core_) from_.emplace(core_->parts());
    if (core_) before_ = from_->group = core_->active_group().value_or(core_->group());
  }

  Replanned run(const std::string& strategy, const OptimizerRecipe& recipe,
                const std::optional<TrainingOptions>& given) {
    const auto start = Clock::now();
    const bool within_backward = BackwardTracker::in_backward();
    if (core_ && !within_backward) ReplanAccess::abandon_failed_step(*core_);
    on_all_ranks(job_, replan_subject, [&] {
      if (within_backward) throw UsageError("replan: called within a backward; call it between two steps");
      check_end_of_step();
      check_target(strategy, recipe, given ? *given : options_for(*core_, strategy));
    });
    agree(job_, "the arguments of replan", arguments_of(strategy, recipe, to_->options));
    count_ranks();
    hold();
    release_module(*module_, to_->options.ignored, precision_before(), to_->options.precision);
    core_.reset();
    if (const auto failure = attempt(*to_, after_)) {
      go_back();
      std::rethrow_exception(failure);
    }
    result_.from = source_->index().strategy;
    result_.to = strategy;
    result_.bytes = source_->received();
    result_.seconds = std::chrono::duration<double>(Clock::now() - start).count();
    return std::move(result_);
  }

 private:
  void check_end_of_step() const {
    if (!core_) return;
    const auto scope = ReplanAccess::open_scope(*core_);
    if (!scope.empty()) throw UsageError(fmt::format("replan: called within {}; end that scope before", scope));
    const auto parameter =
        parameter_with_gradient(*from_->module, from_->options.ignored, ReplanAccess::updates_in_backward(*core_));
    if (!parameter.empty()) {
      throw UsageError(
          fmt::format("replan: parameter {} has a gradient, which would be lost; call it after step() and zero_grad(), "
                      "not in the middle of an accumulation",
                      parameter));
    }
    refuse_alone(from_->strategy);
  }

  void check_target(const std::string& strategy, const OptimizerRecipe& recipe, const TrainingOptions& options) {
    if (!module_) throw UsageError("replan: the module is nullptr");
    if (from_ && from_->module != module_) throw UsageError("replan: the module is not the training's own");
    to_.emplace(checked_parts(strategy, module_, recipe, after_.value_or(job_), options));
    refuse_alone(to_->strategy);
  }

  static void refuse_alone(const Strategy& strategy) {
    if (strategy.synchronization != Synchronization::independent) return;
    throw UsageError(fmt::format("replan: ranks of strategy {} know nothing of each other and have no state in common",
                                 strategy.name));
  }

  void count_ranks() {
    const auto before = place_in(before_);
    const auto after = place_in(after_);
    auto all = at::empty({4 * job_.size()}, at::kLong);
    const auto own = at::tensor(std::vector<int64_t>{before.rank, before.size, after.rank, after.size}, at::kLong);
    job_.all_gather(all, own, {-1, -1, "ranks of the training"}).wait();
    std::vector<Place> befores;
    std::vector<Place> afters;
    for (int rank = 0; rank < job_.size(); ++rank) {
      const auto* numbers = all.const_data_ptr<int64_t>() + 4 * rank;
      befores.push_back({static_cast<int>(numbers[0]), static_cast<int>(numbers[1])});
      afters.push_back({static_cast<int>(numbers[2]), static_cast<int>(numbers[3])});
    }
    result_.ranks_before = ranks_of(befores, "before", job_);
    result_.ranks = ranks_of(afters, "after", job_);
  }

  // Takes the training's state into memory that does not belong to it.
  void hold() {
    std::optional<HeldContents> held;
    if (core_) {
      auto state = core_->state();
      if (!state) throw UsageError(fmt::format("replan: strategy {} has no checkpoint state", from_->strategy.name));
      auto& parts = state->state();
      const auto group = parts.source->group();
      held.emplace(HeldContents{.contents = contents_of(*parts.source, group, parts.companions, {}),
                                .rank = group.rank(),
                                .ranks = group.size()});
    }
    source_ = std::make_shared<MemorySource>(job_, replan_subject, held);
  }

  // Of a module that comes new it is that of the target.
  const Precision& precision_before() const { return (from_ ? *from_ : *to_).options.precision; }

  // Makes the training and gives it the state. Returns the error if that fails on some rank; others have one, too.
  std::exception_ptr attempt(const TrainingParts& parts, const std::optional<Group>& group) {
    std::exception_ptr failure;
    if (!group) {
      source_->serve();
    } else {
      try {
        make_and_load(parts);
      } catch (const CommError&) {
        throw;
      } catch (const std::exception&) {
        failure = std::current_exception();
      }
      source_->close();
    }
    try {
      on_all_ranks(job_, replan_subject, [&] {
        if (failure) std::rethrow_exception(failure);
      });
    } catch (const CommError&) {
      throw;
    } catch (const Error&) {
      return failure ? failure : std::current_exception();
    }
    return nullptr;
  }

  void make_and_load(const TrainingParts& parts) {
    if (!parts.strategy.takes_deferred) materialize(parts.module->parameters());
    core_ = parts.strategy.make(parts);
    auto state = core_->state();
    if (!state) throw UsageError(fmt::format("replan: strategy {} has no checkpoint state", parts.strategy.name));
    auto& loading = state->state();
    const auto together = [&](const std::function<void()>& work) {
      on_all_ranks(parts.group, replan_subject, [&] { source_->together(work); });
    };
    result_.differences =
        load_from(SliceReader(source_), *loading.source, loading.companions, LoadOptions(), together, kept())
            .differences;
  }

  // What neither training touches stays as it is; ranks that come new take the others'.
  std::set<std::string> kept() const {
    std::set<std::string> names;
    if (!from_) return names;
    const auto names_of = [&](const std::vector<std::string>& ignored) {
      std::set<std::string> list;
      const auto tensors = walk(*module_, ignored);
      for (const auto& entry : tensors.parameters) list.insert(entry.name);
      for (const auto& entry : tensors.buffers) list.insert(entry.name);
      return list;
    };
    const auto before = names_of(from_->options.ignored);
    const auto after = names_of(to_->options.ignored);
    for (const auto& name : names_of({})) {
      if (!before.contains(name) && !after.contains(name)) names.insert(name);
    }
    return names;
  }

  // Continues the training as it was. If that fails, too, its error is thrown, and the training is lost.
  void go_back() {
    release_module(*module_, to_->options.ignored, to_->options.precision, precision_before());
    core_.reset();
    const auto lost = from_ ? attempt(*from_, before_) : attempt(*to_, std::nullopt);
    if (lost) std::rethrow_exception(lost);
  }

  std::unique_ptr<TrainingCore>& core_;
  std::shared_ptr<torch::nn::Module> module_;
  std::optional<TrainingParts> from_{};
  std::optional<TrainingParts> to_{};
  std::optional<Group> before_{};
  std::optional<Group> after_{};
  Group job_;
  std::shared_ptr<MemorySource> source_{};
  Replanned result_{};
};

// The names that precision_of() knows; empty: none of them.
std::string name_of(const std::string& strategy, const Precision& precision) {
  for (const auto& name : precision_names(strategy)) {
    const auto named = precision_of(strategy, name);
    const bool same = named.parameters == precision.parameters && named.compute == precision.compute &&
                      named.scaler.has_value() == precision.scaler.has_value();
    if (same) return name;
  }
  return "";
}

}  // namespace

namespace detail {

void refuse_lost_training() {
  throw UsageError(
      "the training is gone: a rank died in replan(), or the training has been moved; continue from a checkpoint");
}

}  // namespace detail

TrainingOptions options_for(const TrainingCore& core, const std::string& strategy) {
  auto options = core.parts().options;
  const auto& chosen = find_strategy(strategy);
  if (options.schedule && !chosen.takes_schedule) {
    throw UsageError(
        fmt::format("replan: strategy {} takes no schedule, and the training has one; give options without it, and "
                    "make a schedule of optimizer() afterwards",
                    strategy));
  }
  if (chosen.name == core.strategy().name) return options;
  options.options.clear();
  options.communication_hook.reset();
  const auto name = name_of(core.strategy().name, options.precision);
  const auto here = precision_names(strategy);
  if (std::find(here.begin(), here.end(), name) == here.end()) return options;
  const auto scaler = options.precision.scaler;  // with the settings that it has
  options.precision = precision_of(strategy, name);
  if (scaler) options.precision.scaler = scaler;
  return options;
}

Replanned replan_core(std::unique_ptr<TrainingCore>& core, const std::string& strategy,
                      const std::shared_ptr<torch::nn::Module>& module, const OptimizerRecipe& recipe,
                      const std::optional<Group>& group, const Group& job,
                      const std::optional<TrainingOptions>& options) {
  return Change(core, module, group, job).run(strategy, recipe, options);
}

}  // namespace shoal
