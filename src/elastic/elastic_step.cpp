// A step: gradients, commit, update.

#include <c10/util/ScopeExit.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "comm/group/no_communication.h"
#include "elastic/access.h"
#include "elastic/elastic_state.h"
#include "engine/sharded/early_use.h"

namespace shoal {

void Elastic::State::begin_step(int64_t count) {
  ready = Ready::no;
  count_dropped();
  began_at = parts->step();
  reductions_before = parts->reductions();
  if (sampler != nullptr) batch.require(count, *sampler, taken + skipped);
  samples = count / batch.own_shares();
  places = samples * batch.shares();
  earlier.begin_step();
  copies.take();
  compared.reset();
  if (generations->has_trial() || !generations->have_come().empty()) compared.emplace(*parts, done);
  in_step = true;
}

void Elastic::State::commit() {
  earlier.look();
  bool map = false;
  try {
    map = parts->prepare_commit();
  } catch (const UsageError&) {
    if (!earlier.found()) throw;  // else all ranks are told what is wrong
  }
  if (parts->finishes_alone() && !earlier.found()) {
    // A program may have caught the error of a backward that a death has cut off.
    const bool reduced = parts->reductions() > reductions_before;
    ready = !parts->reduces() ? Ready::if_another_has : reduced ? Ready::yes : Ready::no;
  }
  if (parts->has_replicas()) return commit_over_hosts(map);
  parts->commit(meet(map));
}

bool Elastic::State::meet(bool map) {
  const auto count = static_cast<double>(samples);
  const auto* joins = generations->joins();
  const bool knock = joins != nullptr && joins->anyone_knocks();
  const auto complete = static_cast<double>(done);
  std::vector<double> values{count,    -count,   map ? 1.0 : 0.0, earlier.found() ? 1.0 : 0.0, knock ? 1.0 : 0.0,
                             complete, -complete};
  const auto of_epoch = static_cast<double>(sampler != nullptr ? sampler->epoch() : 0);
  for (const double place : {static_cast<double>(pass), of_epoch}) values.insert(values.end(), {place, -place});
  const auto drops = static_cast<int64_t>(values.size());
  values.resize(values.size() + static_cast<size_t>(world.size()));  // by rank
  values[static_cast<size_t>(drops + world.rank())] = static_cast<double>(dropped);
  const auto fixed = static_cast<int64_t>(values.size());
  std::optional<Comparison> own;
  if (!generations->have_come().empty()) {
    own = compared;
    own->add_options(*parts);
    const auto set = own->values();
    values.insert(values.end(), set.begin(), set.end());
  }
  const auto most = world.group().all_reduce(values, ReduceOp::max, {parts->step(), -1, "commit of the step"});
  if (most[3] != 0) earlier.refuse();
  if (most[5] != -most[6]) {
    throw UsageError(
        fmt::format("Elastic: ranks have completed {} to {} steps, although none has ended: do all ranks call step() "
                    "equally often?",
                    -most[6], most[5]));
  }
  require_equal_drops({most.begin() + drops, most.begin() + fixed});
  require_one_pass({most.begin() + 7, most.begin() + drops});
  if (sampler != nullptr && most[0] != -most[1]) {
    throw UsageError(
        fmt::format("Elastic: ranks have {} to {} samples in one step: the sampler gives all ranks equally "
                    "many, so give their loaders the same batch size",
                    -most[1], most[0]));
  }
  if (own) require_alike(*own, {most.begin() + fixed, most.end()});
  asked = most[4] != 0;
  return most[2] != 0;
}

// Once one rank has come through the meeting, all have their gradients, and all of a host have mapped each other's.
// Others may fail in the meeting, as a rank ends in it, so all ask what holds. Nobody can say that it passes before all
// have come.
void Elastic::State::commit_over_hosts(bool map) {
  parts->map_on_host(map);
  const auto decide = [&](bool passes) { return generations->decide(decisions, passes); };
  try {
    meet(false);
  } catch (const CommError&) {
    ++decisions;
    if (!parts->commit_over_hosts(false, decide)) throw;
    asked = false;
    return;
  }
  ++decisions;  // not where the meeting has refused the step on all ranks
  if (!parts->commit_over_hosts(true, decide)) throw CommError("a rank has ended in the commit of the step");
}

void Elastic::State::finish(const std::function<void()>& update) {
  in_step ? finish_step(update) : update();
  ready = Ready::no;
  ++changes;
}

// A sum may be made in the update where this rank is alone; it is over shares as well.
void Elastic::State::finish_step(const std::function<void()>& update) {
  const auto end = c10::make_scope_exit([this] { batch.end_step(); });
  const auto turn = parts->begin_update();
  const auto fail = [this] {
    failed = true;
    generations->resign();  // the others have finished this step, or will finish it for this rank
  };
  const NoCommunication scope(
      "in the second function of Elastic::step(), which could not be finished after a death: communicate in the "
      "first one, clipping too, or in together()");
  const auto leave = [&] {
    if (scope.broken() || !parts->update_was_refused()) fail();
    throw;
  };
  try {
    update();
  } catch (const CommError& error) {  // not of a group: a recovery would not mend it
    fail();
    throw UsageError(fmt::format("Elastic: the second function of step() has failed: {}", error.what()));
  } catch (const UsageError& error) {
    const bool is_early_use = std::string(error.what()).find(about_early_use) != std::string::npos;
    if (!is_early_use) leave();  // it is behind the optimizer's step, and publish_update() tells all ranks
  } catch (...) {
    leave();
  }
  if (parts->misses_update()) {
    fail();
    throw UsageError(
        "Elastic: the second function of step() did not update, as it did on another rank: it left "
        "optimizer.step() out, or caught its error; this rank has left the job");
  }
  parts->check_update();
  in_step = false;
  dropped = 0;
  end_trial();
  ++done;
  taken += std::exchange(skipped, 0) + static_cast<size_t>(places);
}

void Elastic::State::require_between_steps(const char* what) const {
  if (failed) {
    throw UsageError(
        "Elastic: an update has failed on this rank, whose parameters may be half updated: it has left the job, "
        "and the others go on; end the program");
  }
  if (!running) return;
  throw UsageError(
      fmt::format("Elastic: {} is called within step(): communicate directly in the step's first function, and call "
                  "together() and step() between steps",
                  what));
}

// A step that was abandoned, or whose gradients have been reduced, has ended on all ranks; one that a wrapper knows to
// have failed, in forward or backward, does so in the next forward.
void Elastic::State::count_dropped() {
  const auto of = std::exchange(left_step, std::nullopt);
  if (of && parts->reduces() && *of == parts->step() && !parts->is_broken()) ++dropped;
}

void Elastic::State::require_equal_drops(const std::vector<double>& by_rank) {
  const auto least = *std::min_element(by_rank.begin(), by_rank.end());
  std::vector<size_t> ranks;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    if (by_rank[rank] > least) ranks.push_back(rank);
  }
  if (ranks.empty()) return;
  throw UsageError(fmt::format(
      "Elastic: the first function of step() has thrown on rank {} before its backward, and the loop went on, so that "
      "its next samples may have met those of the step before on the other ranks. Catch errors, and repeat what has "
      "failed, within that function; or call abandon_step() where you catch them, of DistributedOptimizer, or of the "
      "wrapper after its forward: the others get StepAbandoned",
      fmt::join(ranks, ", ")));
}

void Elastic::State::undo() {
  ready = Ready::no;
  if (!in_step) return;
  copies.restore();
  batch.end_step();
  if (!earlier.untouched()) {
    for (const auto& parameter : parts->module().parameters()) parameter.mutable_grad().reset();
  }
  in_step = false;
}

// For an exception that the program may catch: backwards outside of Elastic have their usual mean, and a step that
// follows begins with the buffers that all ranks have in common.
void Elastic::State::leave_step() {
  batch.end_step();
  left_step = began_at;
  if (in_step && options.keep_global_batch > 0) copies.restore_buffers();
}

// The program goes on behind the samples of the step, and with what it has changed meanwhile.
void Elastic::State::skip_step() {
  ready = Ready::no;
  if (std::exchange(in_step, false)) skipped += static_cast<size_t>(places);
}

bool Elastic::State::step(int64_t count, const std::function<void()>& compute, const std::function<void()>& update) {
  require_between_steps("step()");
  if (outdated && !asks) {
    if (generations->is_on_trial()) generations->resign();
    throw UsageError(
        "Elastic: the ranks have changed, and this loop never calls in_epoch(), which divides the rest of the samples "
        "anew: make the loader within while (elastic.in_epoch()), and leave it when step() returns false");
  }
  if (outdated) return false;
  begin_loop();
  follow_epoch();
  running = true;
  const auto end = c10::make_scope_exit([this] { running = false; });
  try {
    if (asked && admit()) return false;
    const bool complete = try_step(count, compute, update);
    while (parts->exchange_due()) exchange();
    return complete;
  } catch (...) {
    rethrow_from_trial();
  }
}

// Of parameters, after a step: either every rank can apply it or no rank has.
void Elastic::State::exchange() {
  const std::function<void()> apply = [this] { parts->apply_exchange(); };
  try {
    parts->exchange();
    ready = Ready::yes;
    world.group().barrier().wait();
  } catch (const CommError& error) {
    if (!generations->mends(error)) throw;
    return recover(&apply);
  }
  finish(apply);
}

// The step is complete. If a rank ends here, those that are left get all parameters from their owners.
void Elastic::State::publish_update(int64_t done_before_step) {
  try {
    parts->publish_update();
  } catch (const CommError& error) {
    if (!generations->mends(error)) throw;
    recover(nullptr, done_before_step);
  }
}

bool Elastic::State::try_step(int64_t count, const std::function<void()>& compute,
                              const std::function<void()>& update) {
  const auto before = done;
  const auto begin = std::chrono::steady_clock::now();
  try {
    begin_step(count);
    compute();
    if (training != nullptr) ElasticAccess::prepare_step(*training);
    if (generations->has_trial()) compare_in_trial();
    commit();
  } catch (const CommError& error) {
    if (!generations->mends(error)) throw;
    blame_newcomers(error.what());
    recover(&update);
    if (earlier.found()) earlier.refuse();
    return done > before;
  } catch (const Error& error) {
    leave_step();
    const bool disagree = dynamic_cast<const DisagreeError*>(&error) != nullptr;
    if (disagree) differ = can_blame();
    if ((!disagree && dynamic_cast<const UsageError*>(&error) == nullptr) || !blame_newcomers(error.what())) {
      skip_step();
      throw;
    }
    left_step.reset();  // it is done again
    recover(&update);
    return done > before;
  } catch (...) {
    leave_step();
    skip_step();
    throw;
  }
  try {
    finish(update);
  } catch (...) {
    if (!failed) skip_step();  // the update was refused
    throw;
  }
  publish_update(before);
  step_seconds =
      std::max(step_seconds, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  return true;
}

}  // namespace shoal
