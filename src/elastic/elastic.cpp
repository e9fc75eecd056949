#include "shoal/elastic.h"

#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <set>
#include <utility>

#include "checkpoint/folder.h"
#include "comm/membership/generations.h"
#include "elastic/earlier_gradients.h"
#include "elastic/elastic_parts.h"
#include "elastic/global_batch.h"
#include "elastic/step_copies.h"
#include "elastic/told.h"

namespace shoal {

using SteadyClock = std::chrono::steady_clock;

namespace {

// The sentence of a lost job, with its last checkpoint.
std::string with_checkpoint(const std::string& lost, const std::string& folder) {
  if (folder.empty()) return lost;
  try {
    if (!has_checkpoint(folder)) return fmt::format("{} ({} has none yet)", lost, folder);
    return fmt::format("{} (the last checkpoint is {})", lost, find_checkpoint(folder).string());
  } catch (const CheckpointError& error) {
    return fmt::format("{} ({})", lost, error.what());
  }
}

}  // namespace

struct Elastic::State {
  // of_registry: the training whose parts these are; nullptr: the caller made them.
  State(const World& of, std::unique_ptr<ElasticParts> trained, DistributedSampler* divides,
        const ElasticOptions& chosen, ElasticTraining* of_registry = nullptr)
      : world(of),
        parts(std::move(trained)),
        training(of_registry),
        sampler(divides),
        options(chosen),
        steps_before(parts->step()),
        copies(parts->module()),
        earlier(*parts),
        batch(world, options.keep_global_batch, *parts, copies) {
    options.validate(world.size());
    if (options.keep_global_batch > 0 && parts->replicated() == nullptr) {
      throw UsageError(
          "Elastic: keep_global_batch is supported with DistributedDataParallel and an optimizer that is whole on each "
          "rank only");
    }
    batch.require(sampler);
    const auto transport = world.group().transport();
    const std::set<std::string> supported{"host", "tcp", "gloo", "identity"};
    if (supported.count(transport) == 0) {
      throw UsageError(fmt::format("Elastic: transport {} is not supported: use host, tcp or gloo", transport));
    }
    agree(world.group(), "Elastic",
          {fmt::format("min_ranks {}", options.min_ranks), sampler ? "a sampler" : "no sampler",
           fmt::format("keep_global_batch {}", options.keep_global_batch)});
    batch.choose_seed();
    generations = std::make_unique<Generations>(world);
    parts->guard();
    parts->before_backward([this] { earlier.look(); });
  }
  ~State() { parts->before_backward(nullptr); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  bool begin_epoch() {
    const bool inside = epoch && *epoch == sampler->epoch();
    if (!inside) taken = sampler->taken();
    const bool begins = !inside || outdated;
    divide(taken);
    outdated = false;
    epoch = sampler->epoch();
    if (begins && sampler->num_samples() > 0) return true;
    epoch.reset();
    divide(0);
    return false;
  }

  void divide(size_t from) { batch.divide(*sampler, from); }

  void begin_step(int64_t count) {
    if (sampler != nullptr) batch.require(count, *sampler, taken);
    samples = count / batch.own_shares();
    places = samples * batch.shares();
    earlier.begin_step();
    copies.take();
    in_step = true;
  }

  // No rank updates before all ranks have their gradients. So either every rank can finish the step or no rank has begun.
  void commit() {
    earlier.look();
    bool map = false;
    try {
      map = parts->prepare_commit();
    } catch (const UsageError&) {
      if (!earlier.found()) throw;  // else all ranks are told what is wrong
    }
    has_gradients = !parts->sharded() && !earlier.found();
    const auto count = static_cast<double>(samples);
    const auto most = world.group().all_reduce({count, -count, map ? 1.0 : 0.0, earlier.found() ? 1.0 : 0.0},
                                               ReduceOp::max, {parts->step(), -1, "commit of the step"});
    if (most[3] != 0) earlier.refuse();
    if (sampler != nullptr && most[0] != -most[1]) {
      throw UsageError(
          fmt::format("Elastic: ranks have {} to {} samples in one step: the sampler gives all ranks equally "
                      "many, so give their loaders the same batch size",
                      -most[1], most[0]));
    }
    parts->commit(most[2] != 0);
  }

  void finish(const std::function<void()>& update) {
    batch.end_step();
    try {
      update();
    } catch (const CommError& error) {
      throw UsageError(fmt::format(
          "Elastic: the update communicated, and cannot be finished after a death: communicate in the step's "
          "first function, or in together() ({})",
          error.what()));
    }
    in_step = has_gradients = false;
    ++done;
    taken += static_cast<size_t>(places);
  }

  void undo() {
    if (!in_step) return;
    copies.restore();
    batch.end_step();
    if (!earlier.untouched()) {
      for (const auto& parameter : parts->module().parameters()) parameter.mutable_grad().reset();
    }
    in_step = has_gradients = false;
  }

  bool step(int64_t count, const std::function<void()>& compute, const std::function<void()>& update) {
    if (outdated) return false;
    begin_step(count);
    const auto before = done;
    try {
      compute();
      if (training != nullptr) training->prepare_step();
      commit();
    } catch (const CommError& error) {
      if (!generations->mends(error)) throw;
      recover(&update);
      if (earlier.found()) earlier.refuse();
      return done > before;
    } catch (...) {
      batch.end_step();  // backwards outside of Elastic have their usual mean
      throw;
    }
    finish(update);
    return true;
  }

  // update: of the step that was cut off; nullptr outside of one.
  void recover(const std::function<void()>* update) {
    try {
      go_on(update);
    } catch (const JobLost& lost) {
      throw JobLost(with_checkpoint(lost.what(), options.checkpoints));
    }
  }

  void go_on(const std::function<void()>* update) {
    const auto begin = SteadyClock::now();
    const auto former = world.group();
    const auto members = generations->members();
    const auto done_before = done;
    while (true) {
      generations->recover(options.min_ranks);
      try {
        settle(update);
        parts->regroup(world.group(), steps_before + done);
        if (training != nullptr) training->follow(world.group());
        break;
      } catch (const CommError&) {
        if (!generations->broken()) throw;
      }
    }
    if (sampler != nullptr) {
      outdated = true;
      divide(epoch && *epoch == sampler->epoch() ? taken : 0);
    }
    ElasticChange change{.generation = generations->number(),
                         .ranks = world.size(),
                         .step = done,
                         .finished_step = done > done_before,
                         .seconds = std::chrono::duration<double>(SteadyClock::now() - begin).count()};
    const auto& left = generations->members();
    for (size_t rank = 0; rank < members.size(); ++rank) {
      if (std::binary_search(left.begin(), left.end(), members[rank])) continue;
      change.lost.push_back(static_cast<int>(rank));
      change.lost_first.push_back(members[rank]);
    }
    tell(change, options, world.rank(), former);
  }

  // Finishes the step if some rank may have finished it, which then all can; otherwise undoes it. Repeatable: a rank that
  // has done so before another one died has what the others now decide on.
  void settle(const std::function<void()>* update) {
    const auto group = world.group();
    const auto own = at::tensor({done, static_cast<int64_t>(has_gradients), ended}, at::kLong);
    auto all = at::empty({group.size(), 3}, at::kLong);
    group.all_gather(all.view({-1}), own, {-1, -1, "how far the ranks are"}).wait();
    const auto furthest = all.select(1, 0).max().item<int64_t>();
    const auto least = all.select(1, 0).min().item<int64_t>();
    most_ended = all.select(1, 2).max().item<int64_t>();
    const bool all_can = all.select(1, 1).min().item<int64_t>() != 0;
    const bool behind = done < furthest;
    if (furthest - least > 1 || (behind && (!has_gradients || update == nullptr))) {
      throw JobLost(
          fmt::format("ranks have completed {} to {} steps, and cannot be brought to one: do all ranks call "
                      "step() equally often?",
                      least, furthest));
    }
    if (behind || (least == furthest && all_can && update != nullptr)) {
      finish(*update);
    } else {
      undo();
    }
  }

  World world;
  std::unique_ptr<ElasticParts> parts;
  ElasticTraining* training;
  DistributedSampler* sampler;
  ElasticOptions options;
  int64_t steps_before;
  StepCopies copies;
  EarlierGradients earlier;
  GlobalBatch batch;
  std::unique_ptr<Generations> generations;

  int64_t done = 0;
  int64_t samples = 0;         // of a share in the step
  int64_t places = 0;          // of the epoch that the step takes
  bool in_step = false;        // a step has begun and is neither finished nor undone
  bool has_gradients = false;  // of the step, from all ranks
  bool outdated = false;       // the loader's division is the former world's
  int64_t ended = 0;           // calls of together() that this rank has ended
  int64_t most_ended = 0;      // the most of all ranks, at the last recovery
  size_t taken = 0;            // places of the epoch that complete steps have used
  std::optional<size_t> epoch;
};

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

Elastic::Elastic(const World& world, ElasticTraining& training, DistributedSampler& sampler,
                 const ElasticOptions& options)
    : state_(std::make_unique<State>(world, elastic_parts(world, training), &sampler, options, &training)) {}

Elastic::Elastic(const World& world, ElasticTraining& training, const ElasticOptions& options)
    : state_(std::make_unique<State>(world, elastic_parts(world, training), nullptr, options, &training)) {}

Elastic::~Elastic() = default;

bool Elastic::in_epoch() {
  if (state_->sampler == nullptr) throw UsageError("Elastic: in_epoch() needs a sampler: pass it to the constructor");
  return state_->begin_epoch();
}

bool Elastic::step(int64_t samples, const std::function<void()>& compute, const std::function<void()>& update) {
  return state_->step(
      samples, [&] { state_->batch.compute(state_->done, compute); }, update);
}

bool Elastic::step(int64_t samples, const std::function<void(int64_t begin, int64_t end)>& compute,
                   const std::function<void()>& update) {
  return state_->step(
      samples, [&] { state_->batch.compute(state_->done, samples, compute); }, update);
}

int64_t Elastic::batch_size() const {
  return state_->batch.own_size();
}

void Elastic::recover() {
  if (state_->in_step) throw UsageError("Elastic: recover() is called by step() itself");
  state_->recover(nullptr);
}

void Elastic::recover_from(const CommError& error) {
  if (!state_->generations->mends(error)) throw;
  recover();
}

void Elastic::end_together() {
  state_->world.group().barrier().wait();
  ++state_->ended;
}

bool Elastic::has_ended_elsewhere(bool has_result) {
  if (state_->most_ended == state_->ended) return false;
  if (!has_result)
    throw UsageError("Elastic: ranks do not call together() equally often, or one of them calls recover()");
  ++state_->ended;
  return true;
}

int64_t Elastic::steps() const {
  return state_->done;
}

uint64_t Elastic::generation() const {
  return state_->generations->number();
}

}  // namespace shoal
