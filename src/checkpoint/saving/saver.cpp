#include "checkpoint/saving/saver.h"

#include <fmt/format.h>

#include <future>
#include <numeric>
#include <utility>

#include "base/limits.h"
#include "base/start_thread.h"
#include "checkpoint/saving/save_job.h"
#include "comm/group/group_state.h"
#include "comm/rendezvous/world_state.h"
#include "comm/store/warn.h"
#include "shoal/error.h"
#include "shoal/group.h"

namespace shoal {
namespace {

// Separate from the caller's group, because a background thread communicates on it.
Group own_group(const Group& group) {
  std::vector<int> ranks(group.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return group.subgroup(ranks);
}

}  // namespace

void CheckpointSaverOptions::validate() const {
  std::string faults;
  if (keep_last < 0) faults += fmt::format("keep_last {} is below 0; ", keep_last);
  if (snapshot_mb < 0) faults += fmt::format("snapshot_mb {} is below 0; ", snapshot_mb);
  if (!faults.empty()) throw UsageError("CheckpointSaverOptions: " + faults.substr(0, faults.size() - 2));
}

struct CheckpointSaver::State {
  State(const Group& all, std::filesystem::path folder, const CheckpointSaverOptions& chosen)
      : group(own_group(all)), root(std::move(folder)), options(chosen) {}

  std::unique_ptr<SaveJob> start(const CheckpointContents& contents) {
    return std::make_unique<SaveJob>(group, root, options.keep_last, contents, orders);
  }

  Group group;
  std::filesystem::path root;
  CheckpointSaverOptions options;
  std::shared_ptr<const SaveOrders> orders{};  // of the previous save
  at::Tensor buffer{};                         // kept, because fresh memory costs as much as the copy itself
  std::future<void> background{};
  std::filesystem::path writes{};  // the checkpoint that it writes
  std::string lost{};
  std::future<void> removal{};  // removal of old checkpoints
};

CheckpointSaver::CheckpointSaver(const Group& group, std::filesystem::path root,
                                 const CheckpointSaverOptions& options) {
  options.validate();
  const auto& world = *state_of(group)->world;
  if (world.join.number && !world.watch) {
    throw UsageError(
        "a newcomer saves a checkpoint before the elastic job has admitted it, which would replace the job's: save "
        "after the constructor of Elastic, in the loop");
  }
  agree(group, "checkpoint", {fmt::format("snapshot_mb {}", options.snapshot_mb)});
  state_ = std::make_unique<State>(group, std::move(root), options);
}

CheckpointSaver::~CheckpointSaver() {
  if (!state_) return;
  for (auto* future : {&state_->removal, &state_->background}) {
    try {
      if (future->valid()) future->get();
    } catch (const std::exception& error) {  // nobody can catch it any more
      warn(fmt::format("a checkpoint's background save has failed, and nobody called wait(): {}", error.what()));
    }
  }
}

void CheckpointSaver::save(const CheckpointContents& contents) {
  wait();
  state_->removal = state_->start(contents)->finish();
}

void CheckpointSaver::save_async(const CheckpointContents& contents) {
  wait();
  std::shared_ptr<SaveJob> job = state_->start(contents);
  job->detach(state_->buffer, bytes_of_mebibytes(static_cast<double>(state_->options.snapshot_mb)));
  state_->background = start_async("saves a checkpoint", [job] { job->finish(); });
  state_->writes = state_->root / step_name(contents.step);
}

void CheckpointSaver::wait() {
  if (state_->removal.valid()) state_->removal.get();
  if (!state_->background.valid()) return;
  try {
    state_->background.get();
  } catch (const CommError&) {
    const auto& group = *state_of(state_->group);
    if (!group.world->watch) throw;
    std::error_code ignored;
    if (!std::filesystem::exists(state_->writes, ignored)) state_->lost = state_->writes.string();
    if (group.progress->ended.text().empty()) throw;  // they have not changed yet
  }
}

std::string CheckpointSaver::take_lost() {
  return std::exchange(state_->lost, {});
}

bool CheckpointSaver::busy() const {
  return state_->background.valid() &&
         state_->background.wait_for(std::chrono::seconds(0)) != std::future_status::ready;
}

}  // namespace shoal
