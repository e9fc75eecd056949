#pragma once
// Parts of a TrainingState, and its load from any source of slices.

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "checkpoint/loading/slice_reader.h"
#include "checkpoint/saving/saver.h"
#include "engine/checkpoint/contents.h"

namespace shoal {

struct TrainingState::State {
  std::shared_ptr<CheckpointSource> source;
  Companions companions{};
  std::unique_ptr<CheckpointSaver> saver{};
  // Settings of the present saver.
  std::optional<Group> group{};
  std::filesystem::path run{};
  int64_t keep_last = 0;
  int64_t snapshot_mb = 0;

  // Returns a saver for these options and the ranks that are still there. Collective.
  CheckpointSaver& saver_for(const std::filesystem::path& given, const SaveOptions& options);
  void wait() const;
  CheckpointContents contents(const SaveOptions& options) const {
    return contents_of(*source, *group, companions, options);
  }
};

// Sets the strategy's own schedules, of which the program has none, to so many steps, as a load does.
void set_own_schedules(TrainingState& training, int64_t steps);

// Runs work, which does not communicate except by reading, on every rank; if it throws on some of them, throws on all.
using Together = std::function<void(const std::function<void()>& work)>;

// path of the result: empty. kept: tensors of which this rank keeps its values. Collective over source.group(); errors
// as for load() of shoal/checkpoint.h.
Loaded load_from(const SliceReader& reader, CheckpointSource& source, const Companions& companions,
                 const LoadOptions& options, const Together& together, const std::set<std::string>& kept = {});

}  // namespace shoal
