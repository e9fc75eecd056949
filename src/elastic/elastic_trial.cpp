// The first steps of a rank that has come to the job.

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "comm/group/group_state.h"
#include "comm/rendezvous/world_state.h"
#include "elastic/elastic_state.h"
#include "shoal/error.h"

namespace shoal {
namespace {

using Milliseconds = std::chrono::milliseconds;

// For a newcomer to be where the others are, beside the time that their steps take.
constexpr Milliseconds patience(10'000);

// For a newcomer to take its share of parameters and state. A process that is stopped must not keep the others longer.
constexpr Milliseconds patience_in_regroup(30'000);

}  // namespace

void Elastic::State::begin_loop() {
  arrival.begun = true;
  cell_of(world)->state->withheld = false;
}

// A newcomer's own waits have the world's limit, because it cannot tell whether another one is late.
void Elastic::State::limit_waits(Milliseconds for_newcomers) {
  if (!arrival.proven) return;
  const Milliseconds world_limit(std::chrono::seconds(cell_of(world)->state->options.timeout_seconds));
  const auto limit = std::max(std::min(for_newcomers, world_limit), waits.longest);
  auto& progress = *state_of(world.group())->progress;
  progress.timeout_ms = limit.count();  // 0: the world's limit
  if (progress.checks) progress.checks->progress->timeout_ms = limit.count();
}

void Elastic::State::wait_longer() {
  const Milliseconds world_limit(std::chrono::seconds(cell_of(world)->state->options.timeout_seconds));
  waits.lengthen(world_limit);
  generations->set_straggler_limit(waits.longest);
}

void Elastic::State::begin_admission() {
  limit_waits(waits.for_newcomers(patience_in_regroup));
}

void Elastic::State::begin_trial() {
  const auto limit = waits.for_newcomers(patience);
  generations->set_patience(limit);
  if (generations->has_trial()) limit_waits(limit);
}

void Elastic::State::end_trial() {
  if (!generations->has_trial()) return;
  generations->end_trial();
  arrival.proven = true;
  limit_waits();
}

bool Elastic::State::is_one_of(const MemberList& members) const {
  return std::binary_search(members.begin(), members.end(), generations->self());
}

void Elastic::State::compare_in_trial() {
  auto own = *current_step.compared;
  own.add_options(*parts);
  Extent samples(static_cast<double>(current_step.samples));
  std::vector<double> values{samples.most, samples.minus_least};
  const auto set = own.values();
  values.insert(values.end(), set.begin(), set.end());
  const auto most = world.group().all_reduce(values, ReduceOp::max, {parts->step(), -1, "first step of a newcomer"});
  samples.most = most[0];
  samples.minus_least = most[1];
  if (sampler != nullptr && samples.differs()) {
    throw UsageError(fmt::format(
        "Elastic: with a newcomer, ranks have {} to {} samples in one step, and this one has {}: a batch size "
        "that follows from the number of ranks must not differ in a rank that comes",
        samples.least(), samples.most, current_step.samples));
  }
  require_alike(own, {most.begin() + 2, most.end()});
}

void Elastic::State::require_alike(const Comparison& own, const std::vector<double>& most) {
  const auto difference = own.difference(most);
  if (difference.empty()) return;
  trial.ranks_differ = can_blame();
  current_step.ready = Ready::no;  // the gradients are those of parameters that differ
  throw UsageError("Elastic: " + difference);
}

bool Elastic::State::can_blame() const {
  if (generations->has_trial()) return true;
  const auto come = generations->have_come();
  const auto& members = generations->members();
  if (come.empty() || come.size() == members.size()) return false;
  std::vector<int> ranks;
  for (size_t rank = 0; rank < members.size(); ++rank) {
    if (std::binary_search(come.begin(), come.end(), members[rank])) ranks.push_back(static_cast<int>(rank));
  }
  return parts->can_spare(ranks);
}

bool Elastic::State::is_to_blame() const {
  const auto come = generations->have_come();
  return trial.ranks_differ && is_one_of(come) && come.size() < generations->members().size();
}

// All ranks know that they differ; the first ranks count.
bool Elastic::State::blame_newcomers(const std::string& why) {
  if (trial.ranks_differ && !generations->has_trial()) {
    const auto come = generations->have_come();
    if (is_one_of(come)) return false;
    generations->drop(come, why);
    return true;
  }
  return generations->has_trial() && generations->drop_newcomers(why);
}

void Elastic::State::rethrow_from_trial() {
  if (!generations->is_on_trial() && !is_to_blame()) throw;
  generations->resign();
  try {
    throw;
  } catch (const UsageError&) {
    throw;
  } catch (const JobLost&) {
    throw;
  } catch (const DisagreeError& error) {
    throw UsageError(fmt::format(
        "Elastic: this newcomer leaves the job, because it does not do what the other ranks do: {}; its own counters "
        "have begun anew, so let evaluations and the like follow from elastic.steps()",
        error.what()));
  } catch (const Error& error) {
    throw UsageError(fmt::format(
        "Elastic: this newcomer leaves the job, because it failed before its first step with the others was "
        "complete: {}",
        error.what()));
  }
}

}  // namespace shoal
