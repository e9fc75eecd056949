#pragma once
// Source of batches for `shoal train`.

#include <memory>
#include <optional>

#include "cli/train/train_options.h"
#include "data/dataset.h"

namespace shoal::cli {

// Hands out this rank's micro-batches, epoch after epoch.
class Feed {
 public:
  virtual ~Feed() = default;
  // Steps of an epoch, equal on all ranks; none for data without end.
  virtual std::optional<int64_t> steps_per_epoch() const = 0;
  // Called before the first step of each epoch.
  virtual void begin_epoch(int64_t epoch) = 0;
  // Makes what next() hands out in this step, outside its time.
  virtual void prepare(int64_t) {}
  virtual data::Batch next(int64_t step, int micro) = 0;
  // Right after begin_epoch: as if so many steps' batches had been taken.
  virtual void skip(int64_t steps) = 0;
  // Test samples, this rank's share in order; nullptr where there are none.
  virtual std::shared_ptr<data::Dataset> test_data() const = 0;
};

// Throws UsageError where the data is missing or too short; reads as good as nothing.
void check_data(const TrainOptions& options);
std::unique_ptr<Feed> make_feed(const TrainOptions& options, int rank, int ranks);

}  // namespace shoal::cli
