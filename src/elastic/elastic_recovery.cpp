// Recovery of an elastic job after ranks have ended or come.

#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>

#include "checkpoint/folder.h"
#include "elastic/access.h"
#include "elastic/elastic_state.h"
#include "elastic/told.h"
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
  const auto done_before = done_before_step.value_or(done);
  const auto updated_before = parts->updated_elements();
  const bool comes = generations->is_newcomer();
  asked = differ = false;
  int late = 0;
  bool with_newcomers = false;
  while (true) {
    if (training != nullptr) ElasticAccess::leave_groups(*training);
    generations->recover(least_ranks);
    with_newcomers = with_newcomers || generations->has_newcomers();
    // Newcomers get the state within the world's limit.
    if (longest_wait.count() > 0 && !generations->has_newcomers()) limit_waits();
    try {
      const auto newcomers = settle(update);
      if (std::find(newcomers.begin(), newcomers.end(), true) != newcomers.end()) {
        share(newcomers);
        begin_admission();
      }
      parts->regroup(world.group(), steps_before + done);
      if (training != nullptr) ElasticAccess::follow(*training, world.group());
      generations->complete(trial);
      decisions = 0;
      begin_trial();
      break;
    } catch (const CommError& error) {
      const bool mended = generations->broken() || generations->drop_newcomers(error.what());
      // Whoever stands still in the recovery is killed in the next one; of another host that is lost nothing is known
      // yet.
      const bool elsewhere = generations->has_several_hosts();
      const bool again = elsewhere || (proven && longest_wait.count() > 0);
      if (!mended && (!again || ++late == most_late_recoveries)) throw;
      if (!mended) wait_longer();
    } catch (const DisagreeError& error) {
      if (!generations->drop_newcomers(error.what())) throw;
    } catch (const UsageError& error) {  // of an optimizer whose state cannot be divided among more ranks
      if (comes || !generations->has_newcomers() || !generations->drop_newcomers(error.what())) throw;
    }
  }
  open_for_newcomers();
  if (sampler != nullptr) {
    outdated = true;
    batch.outdate_copies(*sampler, epoch ? taken : 0);
    if (comes) sampler->torch::data::samplers::DistributedSampler<>::set_epoch(job_epoch);  // not by the program
    const bool inside = comes || (epoch && *epoch == sampler->epoch());
    divide(inside ? taken : sampler->consumed());  // the program may have begun behind some of the epoch's samples
  }
  if (comes) return;
  ElasticChange change{.generation = generations->number(),
                       .ranks = world.size(),
                       .step = done,
                       .finished_step = done > done_before,
                       .seconds = std::chrono::duration<double>(Clock::now() - begin).count()};
  const auto& left = generations->members();
  for (size_t rank = 0; rank < members.size(); ++rank) {
    if (std::binary_search(left.begin(), left.end(), members[rank])) continue;
    change.lost.push_back(static_cast<int>(rank));
    change.lost_first.push_back(members[rank]);
  }
  if (!change.lost.empty()) change.taken_over = taken_over(*parts, batch, world, updated_before);
  std::set_difference(left.begin(), left.end(), members.begin(), members.end(), std::back_inserter(change.joined));
  // A rank was late, and has come after all.
  if (longest_wait.count() > 0 && left == members && !with_newcomers && !generations->has_trial()) {
    wait_longer();
    limit_waits();
  }
  tell(change, options, world.rank(), former);
}

std::vector<bool> Elastic::State::settle(const std::function<void()>* update) {
  const auto group = world.group();
  const bool comes = generations->is_newcomer();
  const auto own = at::tensor({changes, static_cast<int64_t>(ready), static_cast<int64_t>(comes), ended,
                               static_cast<int64_t>(proven), static_cast<int64_t>(longest_wait.count()),
                               static_cast<int64_t>(taken + skipped), in_step ? places : 0, progress()},
                              at::kLong);
  auto all = at::empty({group.size(), own.numel()}, at::kLong);
  group.all_gather(all.view({-1}), own, {-1, -1, "how far the ranks are"}).wait();
  longest_wait = std::chrono::milliseconds(all.select(1, 5).max().item<int64_t>());
  generations->set_straggler_limit(longest_wait);
  std::vector<bool> newcomers;
  for (int rank = 0; rank < group.size(); ++rank) newcomers.push_back(all[rank][2].item<int64_t>() != 0);
  const auto old = all.index({all.select(1, 2) == 0});
  if (old.size(0) == 0) {
    throw JobLost(
        "all ranks that held the job's state ended before they could send it to the new ranks; the parameters and the "
        "optimizer state are lost");
  }
  most_ended = old.select(1, 3).max().item<int64_t>();
  const auto furthest = old.select(1, 0).max().item<int64_t>();
  const auto least = old.select(1, 0).min().item<int64_t>();
  const bool all_can = old.select(1, 1).min().item<int64_t>() == static_cast<int64_t>(Ready::yes);
  const bool finishes = least == furthest && all_can && update != nullptr;
  trial.clear();
  for (int rank = 0; rank < group.size(); ++rank) {
    const bool passed = furthest > least || finishes || all[rank][4].item<int64_t>() != 0;
    if (newcomers[static_cast<size_t>(rank)] || !passed)
      trial.push_back(generations->members()[static_cast<size_t>(rank)]);
  }
  if (comes) {
    ended = most_ended;
    return newcomers;
  }
  const bool behind = changes < furthest;
  if (furthest - least > 1 || (behind && (ready == Ready::no || update == nullptr))) {
    throw JobLost(fmt::format(
        "ranks have completed {} to {} steps and exchanges, and have no state in common: call step() equally often on "
        "all ranks",
        least, furthest));
  }
  if (behind || finishes) {
    finish(*update);
  } else {
    undo();
  }
  passes_over = old.select(1, 8).max().item<int64_t>() / 2;
  // What all ranks of the pass have taken or skipped: what only some have skipped is done again. The same in a
  // repetition.
  for (int64_t row = 0; row < old.size(0); ++row) {
    if (old[row][8].item<int64_t>() != own[8].item<int64_t>()) continue;
    const bool ends = finishes || old[row][0].item<int64_t>() < furthest;
    const auto place = old[row][6].item<int64_t>() + (ends ? old[row][7].item<int64_t>() : 0);
    taken = std::min(taken + std::exchange(skipped, 0), static_cast<size_t>(place));
  }
  return newcomers;
}

bool Elastic::State::admit() {
  asked = false;
  const auto most = options.keep_global_batch > 0 ? batch.shares() : JoinTable::most_members;
  try {
    parts->prepare_admission();
    if (!generations->admit(static_cast<int>(most), parts->why_one_host())) return false;
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
  Position position{.done = done, .changes = changes, .steps_before = steps_before, .taken = taken, .epoch = epoch};
  position.pass = pass;
  position.passes_over = passes_over;
  if (sampler != nullptr) {
    position.names_epochs = sampler->names_epochs();
    position.next_epoch = sampler->epoch();
    if (!epoch || *epoch != sampler->epoch()) position.taken = sampler->consumed();
  }
  admission.share(world.group(), newcomers, position);
  if (!comes) return;
  done = position.done;
  changes = position.changes;
  steps_before = position.steps_before;
  taken = position.taken;
  epoch = position.epoch;
  pass = position.pass;
  passes_over = position.passes_over;
  job_epoch = position.next_epoch;
  first_epoch = position.names_epochs ? job_epoch : static_cast<size_t>(pass - (epoch ? 1 : 0));
}

void Elastic::State::open_for_newcomers() const {
  auto* joins = generations->joins();
  if (joins == nullptr || world.rank() != 0 || joins->description() || !joins->why_closed().empty()) return;
  terms.publish(*joins);
}

}  // namespace shoal
