// Recovery of an elastic job after ranks have ended or come.

#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>
#include <chrono>
#include <iterator>

#include "checkpoint/folder.h"
#include "elastic/access.h"
#include "elastic/change_report.h"
#include "elastic/elastic_state.h"
#include "shoal/detail/clock.h"

namespace shoal {
namespace {

constexpr int most_late_recoveries = 5;  // of one change of the ranks

}  // namespace

std::string Elastic::State::with_checkpoint(const std::string& lost) const {
  const auto checkpoint = options.checkpoints.empty() ? "" : last_checkpoint_in_words(options.checkpoints);
  // A newcomer has nothing yet, and does not know what the others have.
  return lost + (generations->is_newcomer() ? "" : "; " + parts->lost_shards()) + checkpoint;
}

void Elastic::State::recover(const std::function<void()>* update, std::optional<int64_t> done_before_step) {
  const auto begin = Clock::now();
  const auto former = world.group();
  const auto members = generations->members();
  const auto done_before = done_before_step.value_or(counts.done);
  const auto updated_before = parts->updated_elements();
  const bool comes = generations->is_newcomer();
  trial.requested = trial.ranks_differ = false;
  const bool with_newcomers = begin_generation(update);
  open_for_newcomers();
  if (sampler != nullptr) divide_rest(comes);
  if (comes) return;
  auto change = change_since(members);
  change.finished_step = counts.done > done_before;
  change.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  if (!change.lost.empty()) change.taken_over = taken_over(*parts, batch, world, updated_before);
  // A rank was late, and has come after all.
  if (waits.has_limit() && generations->members() == members && !with_newcomers && !generations->has_trial()) {
    wait_longer();
    limit_waits();
  }
  report_change(change, options, world.rank(), former);
}

bool Elastic::State::begin_generation(const std::function<void()>* update) {
  const bool comes = generations->is_newcomer();
  bool with_newcomers = false;
  for (int late = 0;;) {
    if (training != nullptr) ElasticAccess::leave_groups(*training);
    generations->recover(least_ranks);
    with_newcomers = with_newcomers || generations->has_newcomers();
    // Newcomers get the state within the world's limit.
    if (waits.has_limit() && !generations->has_newcomers()) limit_waits();
    try {
      follow_generation(update);
      return with_newcomers;
    } catch (const CommError& error) {
      const bool mended = generations->broken() || generations->drop_newcomers(error.what());
      // Whoever stands still in the recovery is killed in the next one; of another host that is lost nothing is known
      // yet.
      const bool elsewhere = generations->has_several_hosts();
      const bool again = elsewhere || (arrival.proven && waits.has_limit());
      if (!mended && (!again || ++late == most_late_recoveries)) throw;
      if (!mended) wait_longer();
    } catch (const DisagreeError& error) {
      if (!generations->drop_newcomers(error.what())) throw;
    } catch (const UsageError& error) {  // of an optimizer whose state cannot be divided among more ranks
      if (comes || !generations->has_newcomers() || !generations->drop_newcomers(error.what())) throw;
    }
  }
}

void Elastic::State::follow_generation(const std::function<void()>* update) {
  const auto newcomers = finish_or_undo_step(update);
  if (std::find(newcomers.begin(), newcomers.end(), true) != newcomers.end()) {
    share(newcomers);
    begin_admission();
  }
  parts->regroup(world.group(), counts.steps_before + counts.done);
  if (training != nullptr) ElasticAccess::follow(*training, world.group());
  generations->complete(trial.members);
  counts.decisions = 0;
  begin_trial();
}

void Elastic::State::divide_rest(bool comes) {
  position.outdated = true;
  batch.outdate_copies(*sampler, position.epoch ? position.taken : 0);
  if (comes) sampler->torch::data::samplers::DistributedSampler<>::set_epoch(arrival.job_epoch);  // not by the program
  const bool inside = comes || position.is_in(sampler->epoch());
  divide(inside ? position.taken : sampler->consumed());  // the program may have begun behind some of the samples
}

ElasticChange Elastic::State::change_since(const MemberList& former) const {
  const auto& members = generations->members();
  ElasticChange change{.generation = generations->number(), .ranks = world.size(), .step = counts.done};
  for (size_t rank = 0; rank < former.size(); ++rank) {
    if (std::binary_search(members.begin(), members.end(), former[rank])) continue;
    change.lost.push_back(static_cast<int>(rank));
    change.lost_first.push_back(former[rank]);
  }
  std::set_difference(members.begin(), members.end(), former.begin(), former.end(), std::back_inserter(change.joined));
  return change;
}

RankProgress Elastic::State::progress() const {
  return {.changes = counts.changes,
          .ready = current_step.ready,
          .newcomer = generations->is_newcomer(),
          .proven = arrival.proven,
          .together_calls = together.ended,
          .longest_wait = waits.longest,
          .passes = position.progress(),
          .place = static_cast<int64_t>(position.next_place()),
          .step_places = current_step.unfinished ? current_step.places : 0};
}

std::vector<bool> Elastic::State::finish_or_undo_step(const std::function<void()>* update) {
  const auto own = progress();
  const auto ranks = gather_progress(world.group(), own);
  std::vector<RankProgress> holders;  // of the job's state
  std::vector<bool> newcomers;
  for (const auto& rank : ranks) {
    waits.longest = std::max(waits.longest, rank.longest_wait);
    newcomers.push_back(rank.newcomer);
    if (!rank.newcomer) holders.push_back(rank);
  }
  generations->set_straggler_limit(waits.longest);
  if (holders.empty()) {
    throw JobLost(
        "all ranks that held the job's state ended before they could send it to the new ranks; the parameters and the "
        "optimizer state are lost");
  }
  together.most = 0;
  for (const auto& rank : holders) together.most = std::max(together.most, rank.together_calls);
  const auto decision = decide(holders, update != nullptr);
  trial.members.clear();
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (!decision.proves(ranks[rank])) trial.members.push_back(generations->members()[rank]);
  }
  if (own.newcomer) {
    together.ended = together.most;
    return newcomers;
  }
  if (decision.loses(own, update != nullptr)) {
    throw JobLost(fmt::format(
        "ranks have completed {} to {} steps and exchanges, and have no state in common: call step() equally often on "
        "all ranks",
        decision.least, decision.most));
  }
  decision.finishes(own) ? finish(*update) : undo();
  agree_on_position(holders, own, decision);
  return newcomers;
}

// What all ranks of the pass have taken or skipped: what only some have skipped is done again. The same in a
// repetition.
void Elastic::State::agree_on_position(const std::vector<RankProgress>& holders, const RankProgress& own,
                                       const RecoveryDecision& decision) {
  int64_t furthest = 0;
  for (const auto& rank : holders) {
    furthest = std::max(furthest, rank.passes);
    if (rank.passes == own.passes) position.go_back_to(rank.place + (decision.finishes(rank) ? rank.step_places : 0));
  }
  position.passes_over = furthest / 2;
}

bool Elastic::State::admit() {
  trial.requested = false;
  const auto most = options.keep_global_batch > 0 ? batch.shares() : JoinTable::most_members;
  try {
    parts->prepare_admission();
    const auto* joins = generations->joins();
    const auto changed = joins != nullptr && world.rank() == 0 ? terms.changed_since(*joins) : "";
    if (!generations->admit(static_cast<int>(most), parts->why_one_host(), changed)) return false;
  } catch (const CommError& error) {
    if (!generations->mends(error)) throw;
  }
  // A newcomer has no gradients, and zeros that zero_grad(false) has left would be gradients to an optimizer.
  for (const auto& parameter : parts->module().parameters()) parameter.mutable_grad().reset();
  recover(nullptr);
  return true;
}

void Elastic::State::share(const std::vector<bool>& newcomers) {
  const bool comes = generations->is_newcomer();
  Position given{.done = counts.done,
                 .changes = counts.changes,
                 .steps_before = counts.steps_before,
                 .taken = position.taken,
                 .epoch = position.epoch};
  given.pass = position.pass;
  given.passes_over = position.passes_over;
  if (sampler != nullptr) {
    given.names_epochs = sampler->names_epochs();
    given.next_epoch = sampler->epoch();
    if (!position.is_in(sampler->epoch())) given.taken = sampler->consumed();
  }
  admission.share(world.group(), newcomers, given);
  if (!comes) return;
  counts.done = given.done;
  counts.changes = given.changes;
  counts.steps_before = given.steps_before;
  position.taken = given.taken;
  position.epoch = given.epoch;
  position.pass = given.pass;
  position.passes_over = given.passes_over;
  arrival.job_epoch = given.next_epoch;
  arrival.first_epoch =
      given.names_epochs ? arrival.job_epoch : static_cast<size_t>(position.pass - (position.epoch ? 1 : 0));
}

void Elastic::State::open_for_newcomers() const {
  auto* joins = generations->joins();
  if (joins == nullptr || world.rank() != 0 || joins->description() || !joins->why_closed().empty()) return;
  terms.publish(*joins);
}

}  // namespace shoal
