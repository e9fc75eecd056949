// A step: gradients, commit, update.

#include <c10/util/ScopeExit.h>
#include <fmt/format.h>
#include <torch/utils.h>

#include <chrono>
#include <utility>

#include "comm/group/no_communication.h"
#include "elastic/access.h"
#include "elastic/elastic_state.h"
#include "engine/sharded/early_use.h"

namespace shoal {
namespace {

// What a Join knows of its ranks is of the former world after a change.
void refuse_join(const Reducer* reducer) {
  if (reducer == nullptr || !reducer->join_state()) return;
  throw UsageError(
      "Elastic::step() within a Join: ranks that end or come would leave its count of batches wrong. A sampler of "
      "Elastic gives all ranks equally many samples; leave the Join out");
}

}  // namespace

void Elastic::State::begin_step(int64_t count) {
  current_step.ready = Ready::no;
  refuse_join(parts->reducer());
  dropped.begin_step(*parts);
  current_step.began_at = parts->step();
  current_step.reductions_before = parts->reductions();
  if (sampler != nullptr) batch.require(count, *sampler, position.next_place());
  current_step.samples = count / batch.own_shares();
  current_step.places = current_step.samples * batch.shares();
  earlier.begin_step();
  copies.take();
  current_step.compared.reset();
  if (generations->has_trial() || !generations->have_come().empty()) current_step.compared.emplace(*parts, counts.done);
  current_step.unfinished = true;
}

void Elastic::State::commit() {
  earlier.check();
  bool map = false;
  try {
    map = parts->prepare_commit();
  } catch (const UsageError&) {
    if (!earlier.found()) throw;  // else all ranks are told what is wrong
  }
  if (parts->finishes_alone() && !earlier.found()) {
    // A program may have caught the error of a backward that a death has cut off.
    const bool reduced = parts->reductions() > current_step.reductions_before;
    current_step.ready = !parts->reduces() ? Ready::if_another_has : reduced ? Ready::yes : Ready::no;
  }
  if (parts->has_replicas()) return commit_over_hosts(map);
  parts->commit(meet(map));
}

bool Elastic::State::meet(bool map) {
  const auto* joins = generations->joins();
  CommitReport own{.samples = Extent(static_cast<double>(current_step.samples)),
                   .steps = Extent(static_cast<double>(counts.done)),
                   .pass = Extent(static_cast<double>(position.pass)),
                   .epoch = Extent(static_cast<double>(sampler != nullptr ? sampler->epoch() : 0)),
                   .map = map,
                   .earlier_gradients = earlier.found(),
                   .join_requested = joins != nullptr && joins->anyone_knocks()};
  own.dropped.resize(static_cast<size_t>(world.size()));
  own.dropped[static_cast<size_t>(world.rank())] = static_cast<double>(dropped.count());
  std::optional<Comparison> compared;
  if (!generations->have_come().empty()) {
    compared = current_step.compared;
    compared->add_options(*parts);
    own.compared = compared->values();
  }
  const auto all = own.of_all(world.group(), {parts->step(), -1, "commit of the step"});
  if (all.earlier_gradients) earlier.refuse();
  if (all.steps.differs()) {
    throw UsageError(
        fmt::format("Elastic: ranks have completed {} to {} steps, although none has ended: do all ranks call step() "
                    "equally often?",
                    all.steps.least(), all.steps.most));
  }
  DroppedSteps::require_equal(all.dropped);
  require_one_pass(all.pass, all.epoch);
  if (sampler != nullptr && all.samples.differs()) {
    throw UsageError(
        fmt::format("Elastic: ranks have {} to {} samples in one step: the sampler gives all ranks equally "
                    "many, so give their loaders the same batch size",
                    all.samples.least(), all.samples.most));
  }
  if (compared) require_alike(*compared, all.compared);
  trial.requested = all.join_requested;
  return all.map;
}

// Once one rank has come through the meeting, all have their gradients, and all of a host have mapped each other's.
// Others may fail in the meeting, as a rank ends in it, so all ask what holds. Nobody can say that it passes before all
// have come.
void Elastic::State::commit_over_hosts(bool map) {
  parts->map_on_host(map);
  const auto decide = [&](bool passes) { return generations->decide(counts.decisions, passes); };
  try {
    meet(false);
  } catch (const CommError&) {
    ++counts.decisions;
    if (!parts->commit_over_hosts(false, decide)) throw;
    trial.requested = false;
    return;
  }
  ++counts.decisions;  // not where the meeting has refused the step on all ranks
  if (!parts->commit_over_hosts(true, decide)) throw CommError("a rank has ended in the commit of the step");
}

void Elastic::State::finish(const std::function<void()>& update) {
  current_step.unfinished ? finish_step(update) : update();
  current_step.ready = Ready::no;
  ++counts.changes;
}

// A sum may be made in the update where this rank is alone; it is over shares as well.
void Elastic::State::finish_step(const std::function<void()>& update) {
  const auto end = c10::make_scope_exit([this] { batch.end_step(); });
  const auto turn = parts->begin_update();
  const auto fail = [this] {
    current_step.failed = true;
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
  current_step.unfinished = false;
  dropped.complete_step();
  end_trial();
  ++counts.done;
  position.complete_step(current_step.places);
}

void Elastic::State::require_between_steps(const char* what) const {
  if (current_step.failed) {
    throw UsageError(
        "Elastic: an update has failed on this rank, whose parameters may be half updated: it has left the job, "
        "and the others go on; end the program");
  }
  if (!current_step.running) return;
  throw UsageError(
      fmt::format("Elastic: {} is called within step(): communicate directly in the step's first function, and call "
                  "together() and step() between steps",
                  what));
}

void Elastic::State::undo() {
  current_step.ready = Ready::no;
  if (!current_step.unfinished) return;
  copies.restore();
  batch.end_step();
  if (!earlier.untouched()) {
    for (const auto& parameter : parts->module().parameters()) parameter.mutable_grad().reset();
  }
  current_step.unfinished = false;
}

// For an exception that the program may catch: backwards outside of Elastic have their usual mean, and a step that
// follows begins with the buffers that all ranks have in common.
void Elastic::State::leave_step() {
  batch.end_step();
  dropped.leave(current_step.began_at);
  if (current_step.unfinished && options.keep_global_batch > 0) copies.restore_buffers();
}

// The program goes on behind the samples of the step, and with what it has changed meanwhile.
void Elastic::State::skip_step() {
  current_step.ready = Ready::no;
  if (std::exchange(current_step.unfinished, false)) position.skip_step(current_step.places);
}

bool Elastic::State::step(int64_t count, const std::function<void()>& compute, const std::function<void()>& update) {
  require_between_steps("step()");
  if (position.outdated && !position.asks) {
    if (generations->is_on_trial()) generations->resign();
    throw UsageError(
        "Elastic: the ranks have changed, and this loop never calls in_epoch(), which divides the rest of the samples "
        "anew: make the loader within while (elastic.in_epoch()), and leave it when step() returns false");
  }
  if (position.outdated) return false;
  begin_loop();
  follow_epoch();
  current_step.running = true;
  const auto end = c10::make_scope_exit([this] { current_step.running = false; });
  try {
    if (trial.requested && admit()) return false;
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
    current_step.ready = Ready::yes;
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
  const auto before = counts.done;
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
    return counts.done > before;
  } catch (const Error& error) {
    leave_step();
    const bool disagree = dynamic_cast<const DisagreeError*>(&error) != nullptr;
    if (disagree) trial.ranks_differ = can_blame();
    if ((!disagree && dynamic_cast<const UsageError*>(&error) == nullptr) || !blame_newcomers(error.what())) {
      skip_step();
      throw;
    }
    dropped.repeat();  // it is done again
    recover(&update);
    return counts.done > before;
  } catch (...) {
    leave_step();
    skip_step();
    throw;
  }
  try {
    finish(update);
  } catch (...) {
    if (!current_step.failed) skip_step();  // the update was refused
    throw;
  }
  publish_update(before);
  waits.complete_step(std::chrono::steady_clock::now() - begin);
  return true;
}

}  // namespace shoal
