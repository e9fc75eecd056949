#include "shoal/elastic.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <utility>

#include "base/limits.h"
#include "comm/rendezvous/world_state.h"
#include "elastic/elastic_state.h"
#include "engine/sharded/second_owner_check.h"

namespace shoal {

Elastic::State::State(const World& of, std::unique_ptr<ElasticParts> trained, DistributedSampler* divides,
                      const ElasticOptions& chosen, ElasticTraining* of_registry)
    : world(of),
      parts(std::move(trained)),
      training(of_registry),
      sampler(divides),
      options(chosen),
      copies(parts->module()),
      earlier(*parts),
      batch(world, options.keep_global_batch, options.batch_slices, *parts, copies),
      terms(*parts, sampler, options, training, cell_of(world)->state->options.transport),
      admission(*parts, terms, options, batch) {
  counts.steps_before = parts->step();
  const auto& join = cell_of(world)->state->join;
  if (join.number) {
    auto checked = options;  // but for the global batch, which is the job's
    if (options.keep_global_batch > 0) {
      checked.keep_global_batch = options.batch_slices > 0 ? options.batch_slices : join.table->first_ranks();
    }
    checked.validate(join.table->first_ranks());
  } else {
    options.validate(world.size());
  }
  require_supported();
  least_ranks = std::max(options.min_ranks, join.min_ranks);
  if (join.number) {
    const auto& waits = cell_of(world)->state->options;
    terms.require_alike(*join.table, waits.timeout_seconds, waits.while_waiting);
  } else {
    agree(world.group(), "Elastic",
          {fmt::format("min_ranks {}, straggler_seconds {}, silent_host_seconds {}", options.min_ranks,
                       options.straggler_seconds, options.silent_host_seconds),
           sampler ? "a sampler" : "no sampler",
           fmt::format("keep_global_batch {}, batch_slices {}", options.keep_global_batch, options.batch_slices)});
    // The launchers of several nodes may have been given different ones.
    least_ranks = static_cast<int>(
        world.group().all_reduce(std::vector<double>{static_cast<double>(least_ranks)}, ReduceOp::max)[0]);
    batch.begin();
  }
  waits.longest = wait_of(options.straggler_seconds);
  generations = std::make_unique<Generations>(world, StragglerRule{waits.longest, least_ranks},
                                              wait_of(options.silent_host_seconds));
  if (generations->is_newcomer()) {
    arrival.begun = arrival.in_place = arrival.proven = false;
    naming_checkpoint([this] { recover(nullptr); });
    cell_of(world)->state->withheld = true;
  }
  parts->guard();
  if (waits.has_limit()) limit_waits();
  parts->before_backward([this] { earlier.check(); });
  open_for_newcomers();
}

Elastic::State::~State() {
  parts->before_backward(nullptr);
  const bool copied = cell_of(world)->state->is_forked_copy();
  if (!copied && generations->is_on_trial() && !arrival.begun) generations->resign();
}

void Elastic::State::require_supported() const {
  if (options.keep_global_batch > 0 && !parts->takes_shares()) {
    throw UsageError(
        "Elastic: keep_global_batch needs gradients that are averaged over all ranks; with LocalUpdates each rank, and "
        "with ShardGossipOptimizer each host, updates with its own: leave the option out");
  }
  if (2 * options.straggler_seconds >= cell_of(world)->state->options.timeout_seconds) {
    throw UsageError(
        fmt::format("Elastic: straggler_seconds is {}: give less than half of the world's timeout_seconds, {}",
                    options.straggler_seconds, cell_of(world)->state->options.timeout_seconds));
  }
  batch.require(sampler);
  for (const auto& list : {parts->module().named_parameters(), parts->module().named_buffers()}) {
    for (const auto& entry : list) {
      if (!entry.value().defined() || entry.value().is_cpu()) continue;
      throw UsageError(
          fmt::format("Elastic: {} is on {}; only modules on the CPU are supported, whose memory outlives a rank",
                      entry.key(), entry.value().device().str()));
    }
  }
  const bool launchers_kill = cell_of(world)->state->join.over_hosts.has_value();
  if (world.local_size() < world.size() && options.straggler_seconds > 0 && !launchers_kill) {
    throw UsageError(
        "Elastic: the ranks are on several hosts, of which only launchers can kill a rank for the others: start them "
        "with shoal launch --nnodes and --elastic MIN:MAX, or leave straggler_seconds out");
  }
  const auto transport = world.group().transport();
  const std::set<std::string> supported{"host", "host+tcp", "tcp", "gloo", "identity"};
  if (supported.count(transport) == 0) {
    throw UsageError(fmt::format("Elastic: transport {} is not supported: use host, tcp or gloo", transport));
  }
}

Elastic::Elastic(const World& world, DataParallelCore& parallel, torch::optim::Optimizer& optimizer,
                 DistributedSampler& sampler, const ElasticOptions& options)
    : state_(std::make_unique<State>(world, elastic_parts(world, parallel, optimizer), &sampler, options)) {}

Elastic::Elastic(const World& world, DataParallelCore& parallel, torch::optim::Optimizer& optimizer,
                 const ElasticOptions& options)
    : state_(std::make_unique<State>(world, elastic_parts(world, parallel, optimizer), nullptr, options)) {}

Elastic::Elastic(const World& world, DistributedOptimizerCore& optimizer, DistributedSampler& sampler,
                 const ElasticOptions& options)
    : state_(std::make_unique<State>(world, elastic_parts(world, optimizer), &sampler, options)) {}

Elastic::Elastic(const World& world, DistributedOptimizerCore& optimizer, const ElasticOptions& options)
    : state_(std::make_unique<State>(world, elastic_parts(world, optimizer), nullptr, options)) {}

Elastic::Elastic(const World& world, LocalUpdates& updates, DistributedSampler& sampler, const ElasticOptions& options)
    : state_(std::make_unique<State>(world, elastic_parts(world, updates), &sampler, options)) {}

Elastic::Elastic(const World& world, LocalUpdates& updates, const ElasticOptions& options)
    : state_(std::make_unique<State>(world, elastic_parts(world, updates), nullptr, options)) {}

Elastic::Elastic(const World& world, ElasticTraining& training, DistributedSampler& sampler,
                 const ElasticOptions& options)
    : state_(std::make_unique<State>(world, elastic_parts(world, training), &sampler, options, &training)) {}

Elastic::Elastic(const World& world, ElasticTraining& training, const ElasticOptions& options)
    : state_(std::make_unique<State>(world, elastic_parts(world, training), nullptr, options, &training)) {}

Elastic::~Elastic() = default;

bool Elastic::in_epoch() {
  if (state_->sampler == nullptr) throw UsageError("Elastic: in_epoch() needs a sampler: pass it to the constructor");
  state_->require_between_steps("in_epoch()");
  return state_->begin_epoch();
}

bool Elastic::step(int64_t samples, const std::function<void()>& compute, const std::function<void()>& update) {
  const auto all = [&] { state_->batch.compute(state_->counts.done, compute); };
  return state_->naming_checkpoint([&] { return state_->step(samples, all, update); });
}

bool Elastic::step(int64_t samples, const std::function<void(int64_t begin, int64_t end)>& compute,
                   const std::function<void()>& update) {
  return step(
      samples, compute, [] {}, update);
}

bool Elastic::step(int64_t samples, const std::function<void(int64_t begin, int64_t end)>& compute,
                   const std::function<void()>& prepare, const std::function<void()>& update) {
  const auto whole = [&] {
    state_->batch.compute(state_->counts.done, samples, compute);
    prepare();
  };
  return state_->naming_checkpoint([&] { return state_->step(samples, whole, update); });
}

int64_t Elastic::batch_size() const {
  return state_->batch.own_size();
}

void Elastic::recover() {
  state_->require_between_steps("recover()");
  state_->naming_checkpoint([&] { state_->recover(nullptr); });
}

void Elastic::recover_from(const CommError& error) {
  if (!state_->generations->mends(error)) throw;
  recover_or_leave(error.what());
}

void Elastic::recover_from(const DisagreeError& error) {
  if (!state_->can_blame()) throw;
  state_->trial.ranks_differ = true;
  recover_or_leave(error.what());
}

void Elastic::recover_or_leave(const std::string& why) {
  try {
    const bool newcomers_fail = state_->blame_newcomers(why);
    const auto& generations = *state_->generations;
    const bool leaves = generations.is_on_trial() ? !generations.broken() : state_->is_to_blame();
    if (!newcomers_fail && leaves) throw;
    recover();
  } catch (...) {
    state_->rethrow_from_trial();
  }
}

void Elastic::begin_loop() {
  state_->begin_loop();
}

void Elastic::require_begun() const {
  state_->require_between_steps("together()");
  if (state_->arrival.begun) return;
  state_->generations->resign();
  throw UsageError(
      "Elastic: this newcomer calls together() before the other ranks come by there: they are in the loop, so call "
      "in_epoch() first, or step() without a sampler, or begin_loop() if they do call together() when the ranks "
      "change");
}

void Elastic::end_together() {
  const auto group = state_->world.group();
  if (const auto updates = state_->parts->updates_to_compare()) {
    const auto own = static_cast<double>(*updates);
    const auto most = group.all_reduce(std::vector<double>{own, -own}, ReduceOp::max, {-1, -1, "updates of all ranks"});
    if (most[0] != -most[1]) refuse_unequal_updates();
  } else {
    group.barrier().wait();
  }
  ++state_->together.ended;
}

bool Elastic::has_ended_elsewhere(bool has_result) {
  if (state_->together.most == state_->together.ended) return false;
  if (!has_result)
    throw UsageError("Elastic: ranks do not call together() equally often, or one of them calls recover()");
  ++state_->together.ended;
  return true;
}

size_t Elastic::first_epoch() const {
  if (state_->sampler == nullptr && state_->generations->is_on_trial()) {
    state_->generations->resign();
    throw UsageError(
        "Elastic: first_epoch() in a newcomer needs a sampler, by which the job counts epochs: pass it to the "
        "constructor, or count by steps()");
  }
  return state_->arrival.first_epoch;
}

int64_t Elastic::steps() const {
  return state_->counts.done;
}

uint64_t Elastic::generation() const {
  return state_->generations->number();
}

}  // namespace shoal
