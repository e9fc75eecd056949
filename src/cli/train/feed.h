#pragma once
// Source of batches for `shoal train`.

#include <filesystem>
#include <memory>
#include <optional>
#include <vector>

#include "cli/train/train_options.h"
#include "data/dataset.h"
#include "shoal/data.h"

namespace shoal::cli {

// Source of this rank's micro-batches, epoch after epoch.
class Feed {
 public:
  virtual ~Feed() = default;
  // Steps per epoch, equal on all ranks; nothing for endless data.
  virtual std::optional<int64_t> steps_per_epoch() const = 0;
  // Call before the first step of each epoch.
  virtual void begin_epoch(int64_t epoch) = 0;
  // Prepares the batches of this step, outside of its measured time.
  virtual void prepare(int64_t) {}
  virtual data::Batch next(int64_t step, int micro) = 0;
  // Whether next() is not the epoch's first batch again.
  virtual bool has_next() { return true; }
  // Call right after begin_epoch: skips the batches of `steps` steps.
  virtual void skip(int64_t steps) = 0;
  // For elastic training. The sampler whose data Elastic divides; nullptr: batches depend on rank and step alone.
  virtual DistributedSampler* sampler() { return nullptr; }
  // In place of begin_epoch() and skip(): prepare_epoch() sets the sampler, behind `done` steps of the epoch, open()
  // reads by the sampler's present division.
  virtual void prepare_epoch(int64_t /*epoch*/, int64_t /*done*/) {}
  virtual void open() {}
  // The samples of a step over all ranks, which stay, and those of this rank, which change with the ranks, from the
  // next open() on: one batch per step.
  virtual void keep_batch(int64_t /*all*/, int64_t /*own*/) {}
  // Whole steps in the sampler's present division.
  virtual int64_t steps_left() const { return 0; }
  // Goes on as another rank of fewer.
  virtual void follow(int /*rank*/) {}
  // Samples of the training data; nothing for endless data.
  virtual std::optional<size_t> samples() const { return std::nullopt; }
  // This rank's share of the test samples, in order; nullptr if there are none.
  virtual std::shared_ptr<data::Dataset> test_data() const = 0;
};

// The files that the feed reads. UsageError if the data is missing or too short; reads next to nothing.
std::vector<std::filesystem::path> data_files(const TrainOptions& options);

// The samples that all ranks take theirs from; neither for reference data, and no test samples without --eval.
struct Datasets {
  std::shared_ptr<data::Dataset> train;
  std::shared_ptr<data::Dataset> test;
};
Datasets read_datasets(const TrainOptions& options);
std::unique_ptr<Feed> make_feed(const TrainOptions& options, int rank, int ranks, const Datasets& datasets);

}  // namespace shoal::cli
