#include "engine/checkpoint/training_state.h"

#include <fmt/format.h>
#include <torch/utils.h>

#include <set>

#include "checkpoint/folder.h"
#include "checkpoint/loading/reader.h"
#include "checkpoint/on_all_ranks.h"
#include "comm/group/group_state.h"
#include "comm/rendezvous/world_state.h"
#include "comm/store/warn.h"
#include "engine/checkpoint/loader.h"
#include "engine/checkpoint/names.h"
#include "engine/checkpoint/resized_buffers.h"
#include "engine/checkpoint/schedule.h"
#include "shoal/error.h"

namespace shoal {

namespace names = checkpoint_names;

namespace {

constexpr size_t most_of_position = size_t{2} << 20;  // in the index, where bytes that are no UTF-8 take twice as much

// Carried state from an entry of the state, and from tensors whose names begin with `prefix`. part: theirs, as a model
// may have the same names.
Carried carried(const SliceReader& reader, const nlohmann::json& state, const std::string& prefix, const char* part) {
  Carried all;
  if (const auto found = state.find(names::carried); found != state.end()) all.values = *found;
  const auto& tensors = reader.index().tensors;
  for (auto entry = tensors.lower_bound(prefix); entry != tensors.end() && entry->first.starts_with(prefix); ++entry) {
    if (entry->second.part != part) continue;
    all.tensors[entry->first.substr(prefix.size())] = reader.read(entry->first);
  }
  return all;
}

}  // namespace

CheckpointSaver& TrainingState::State::saver_for(const std::filesystem::path& given, const SaveOptions& options) {
  std::error_code error;
  auto folder = std::filesystem::absolute(given, error);  // the program may change its folder during a background save
  if (error) folder = given;
  const auto now = source->group();
  // In an elastic job ranks that have come have none, and that of the others may be of ranks that have ended.
  const bool elastic = state_of(now)->world->watch != nullptr;
  if (saver || elastic) {
    const bool fits = saver && state_of(*group)->progress->ended.text().empty() && group->name() == now.name() &&
                      group->size() == now.size() && run == folder && keep_last == options.keep_last &&
                      snapshot_mb == options.snapshot_mb;
    // A relative folder may be another one on some ranks, where the program has changed its own.
    const auto other =
        now.all_reduce(fits ? 0.0 : 1.0, ReduceOp::max, {-1, -1, "whether a checkpoint's folder is the last one's"});
    if (other == 0) return *saver;
    if (saver) wait();
  }
  group = now;
  run = folder;
  keep_last = options.keep_last;
  snapshot_mb = options.snapshot_mb;
  saver = std::make_unique<CheckpointSaver>(now, folder,
                                            CheckpointSaverOptions{.keep_last = keep_last, .snapshot_mb = snapshot_mb});
  return *saver;
}

TrainingState::TrainingState(std::shared_ptr<CheckpointSource> source)
    : state_(std::make_unique<State>(State{.source = std::move(source)})) {}

TrainingState::~TrainingState() = default;
TrainingState::TrainingState(TrainingState&&) noexcept = default;

TrainingState& TrainingState::with(GradScaler& scaler) {
  state_->companions.scaler = &scaler;
  return *this;
}

TrainingState& TrainingState::with(torch::optim::LRScheduler& schedule) {
  state_->companions.schedules.emplace_back(&schedule);
  return *this;
}

TrainingState& TrainingState::with(torch::optim::ReduceLROnPlateauScheduler& schedule) {
  state_->companions.schedules.emplace_back(&schedule);
  return *this;
}

void TrainingState::State::wait() const {
  if (!saver) return;
  saver->wait();
  const auto lost = saver->take_lost();
  if (lost.empty() || source->group().rank() != 0) return;
  warn(fmt::format("checkpoint {} was not saved: the ranks changed while it was written", lost));
}

void TrainingState::wait() {
  state_->wait();
}

bool TrainingState::saving() const {
  return state_->saver && state_->saver->busy();
}

void SaveOptions::validate() const {
  std::string faults;
  if (step < 0) faults += fmt::format("step {} is below 0; ", step);
  if (keep_last < 0) faults += fmt::format("keep_last {} is below 0; ", keep_last);
  if (snapshot_mb < 0) faults += fmt::format("snapshot_mb {} is below 0; ", snapshot_mb);
  if (position.size() > most_of_position) {
    faults += fmt::format("position has {} bytes, {} at most: save it in a file of its own; ", position.size(),
                          most_of_position);
  }
  if (!faults.empty()) throw UsageError("SaveOptions: " + faults.substr(0, faults.size() - 2));
}

namespace {

// A position is that of a rank, and so is a scope.
void require_saveable(CheckpointSource& source, const SaveOptions& options) {
  on_all_ranks(source.group(), "checkpoint", [&] {
    options.validate();
    source.require_own_values();
  });
}

}  // namespace

void save(const std::filesystem::path& run, TrainingState& training, const SaveOptions& options) {
  require_saveable(*training.state().source, options);
  auto& saver = training.state().saver_for(run, options);
  saver.save(training.state().contents(options));
}

void save_async(const std::filesystem::path& run, TrainingState& training, const SaveOptions& options) {
  require_saveable(*training.state().source, options);
  auto& saver = training.state().saver_for(run, options);
  saver.save_async(training.state().contents(options));
}

void set_own_schedules(TrainingState& training, int64_t steps) {
  for (auto* schedule : training.state().source->view().schedules) set_steps(*schedule, steps);
}

Loaded load_from(const SliceReader& reader, CheckpointSource& source, const Companions& companions,
                 const LoadOptions& options, const Together& together, const std::set<std::string>& kept) {
  const torch::NoGradGuard no_grad;
  const auto group = source.group();
  const auto& index = reader.index();
  Loaded loaded{.path = {}, .step = index.step, .strategy = index.strategy, .ranks = index.world_size};
  const bool whole = !options.partial && !options.model_only;
  const bool same_ranks = loaded.ranks == group.size() && static_cast<int>(index.rank_states.size()) == loaded.ranks;
  loaded.exact = whole && same_ranks && source.continues(loaded.strategy);
  CarriedStates past;
  const auto peers = source.peers();
  const auto peer = peers ? std::optional(peers->rank()) : std::nullopt;
  // Checks before begin_load(), which may change the training.
  together([&] { source.require_own_values(); });
  source.adopt_changes();
  std::set<std::string> not_here;
  together([&] {
    not_here = TrainingLoader(reader, source.view(), peer, group, loaded.exact, options).trained_there_alone();
  });
  source.own_frozen(not_here);
  ResizedBuffers resized;
  const auto check = [&] {
    for (const auto& [module, prefix] : source.view().modules) resized.take(*module, reader, prefix);
    TrainingLoader(reader, source.view(), peer, group, loaded.exact, options).check();
    if (!whole || index.rank_states.empty()) return;
    const auto& state = index.rank_states[same_ranks ? group.rank() : 0];
    if (const auto found = state.find(names::position); found != state.end()) {
      loaded.position = read_position(*found);
    }
    if (!source.continues(loaded.strategy)) return;
    past.common = carried(reader, index.global_state, names::carried_tensor(""), names::strategy_part);
    if (!loaded.exact) return;
    past.own = carried(reader, state, names::of_rank(group.rank(), names::carried_tensor("")), names::ranks_part);
  };
  try {
    together(check);
  } catch (...) {
    resized.undo();
    throw;
  }
  source.begin_load(past);
  TrainingLoader loader(reader, source.view(), peer, group, loaded.exact, options);
  loader.keep(kept);
  together([&] { loader.read_optimizers(); });
  together([&] {
    loader.read_model();
    loader.finish(companions);
  });
  source.end_load(past);
  loaded.differences = loader.differences();
  for (auto& difference : source.differences()) loaded.differences.push_back(std::move(difference));
  loaded.exact = loaded.exact && loaded.differences.empty();
  return loaded;
}

Loaded load(const std::filesystem::path& path, TrainingState& training, const LoadOptions& options) {
  training.wait();
  auto& source = *training.state().source;
  const auto group = source.group();
  agree(group, "the options of load()",
        {fmt::format("partial {}, model_only {}, rates {}, options {}", options.partial, options.model_only,
                     options.rates, options.options)});
  const auto reader = open_checkpoint(group, path, options.verify);
  auto loaded = load_from(reader, source, training.state().companions, options,
                          [&](const auto& work) { on_all_ranks(group, "checkpoint", work); });
  loaded.path = reader.path();
  for (const auto& difference : loaded.differences) {
    const bool asked_for = !options.rates || !options.options;
    if (!asked_for && group.rank() == 0) warn(fmt::format("{}: {}", reader.name(), difference));
  }
  return loaded;
}

std::optional<Loaded> load_latest(const std::filesystem::path& run, TrainingState& training,
                                  const LoadOptions& options) {
  training.wait();
  const auto group = training.state().source->group();
  auto found = at::zeros({1}, at::kByte);
  on_all_ranks(group, "checkpoint", [&] { found.fill_(has_checkpoint(run)); });
  group.broadcast(found, 0, {.what = "whether there is a checkpoint"}).wait();
  if (!found.item<bool>()) return std::nullopt;
  return load(run, training, options);
}

}  // namespace shoal
