#include "cli/feed.h"

#include <torch/data/dataloader.h>
#include <torch/data/datasets/shared.h>

#include "data/fashion_mnist.h"
#include "data/reference.h"
#include "data/sharded_sampler.h"
#include "data/text_dataset.h"
#include "models/registry.h"

namespace shoal::cli {
namespace {

// All batches are made before training, so that a step's time is training alone.
class ReferenceFeed : public Feed {
 public:
  ReferenceFeed(const TrainOptions& options, int rank) : accumulate_(options.accumulate) {
    for (int64_t step = 0; step < *options.steps; ++step) {
      for (int micro = 0; micro < accumulate_; ++micro) {
        batches_.push_back(data::reference_batch(options.model, options.size,
                                                 {.seed = options.seed,
                                                  .step = static_cast<uint64_t>(step),
                                                  .rank = static_cast<uint64_t>(rank),
                                                  .micro = static_cast<uint64_t>(micro)},
                                                 options.batch, options.data_dtype()));
      }
    }
  }

  std::optional<int64_t> steps_per_epoch() const override { return std::nullopt; }
  void begin_epoch(int64_t) override {}
  data::Batch next(int64_t step, int micro) override { return batches_.at(step * accumulate_ + micro); }
  void skip(int64_t) override {}
  std::shared_ptr<data::Dataset> test_data() const override { return nullptr; }

 private:
  int accumulate_;
  std::vector<data::Batch> batches_;
};

// Samples in memory, served by libtorch's data loader.
class DatasetFeed : public Feed {
 public:
  DatasetFeed(const TrainOptions& options, int rank, int ranks, std::shared_ptr<data::Dataset> train,
              std::shared_ptr<data::Dataset> test)
      : options_(options),
        train_(std::move(train)),
        test_(std::move(test)),
        sampler_(*train_->size(),
                 {.world = static_cast<size_t>(ranks), .rank = static_cast<size_t>(rank), .seed = options.seed}) {}

  std::optional<int64_t> steps_per_epoch() const override {
    const auto samples = static_cast<int64_t>(sampler_.local_size());
    const auto batches = (samples + options_.batch - 1) / options_.batch;
    return std::max<int64_t>(1, batches / options_.accumulate);
  }

  void begin_epoch(int64_t epoch) override {
    sampler_.set_epoch(static_cast<size_t>(epoch));
    loader_ = torch::data::make_data_loader(torch::data::datasets::SharedBatchDataset<data::Dataset>(train_), sampler_,
                                            torch::data::DataLoaderOptions(options_.batch));
    next_.emplace(loader_->begin());
  }

  data::Batch next(int64_t, int) override {
    if (*next_ == loader_->end()) next_.emplace(loader_->begin());  // fewer batches than micro-batches of one step
    auto batch = **next_;
    ++*next_;
    return batch;
  }

  void skip(int64_t steps) override {
    for (int64_t i = 0; i < steps * options_.accumulate; ++i) next(0, 0);
  }

  std::shared_ptr<data::Dataset> test_data() const override { return test_; }

 private:
  using Loader =
      torch::data::StatelessDataLoader<torch::data::datasets::SharedBatchDataset<data::Dataset>, data::ShardedSampler>;
  const TrainOptions& options_;
  std::shared_ptr<data::Dataset> train_;
  std::shared_ptr<data::Dataset> test_;
  data::ShardedSampler sampler_;
  std::unique_ptr<Loader> loader_;
  std::optional<torch::data::Iterator<data::Batch>> next_;
};

}  // namespace

std::unique_ptr<Feed> make_feed(const TrainOptions& options, int rank, int ranks) {
  if (options.reference_data()) return std::make_unique<ReferenceFeed>(options, rank);
  std::shared_ptr<data::Dataset> train;
  std::shared_ptr<data::Dataset> test;
  if (options.text_data()) {
    const std::string file = options.data.substr(options.data.find(':') + 1);
    const auto context = models::gpt_config(options.size).context;
    train = data::text_file(file, context, data::Split::train);
    if (options.eval) test = data::text_file(file, context, data::Split::test);
  } else {
    const auto colon = options.data.find(':');
    std::optional<std::filesystem::path> folder;
    if (colon != std::string::npos) folder = options.data.substr(colon + 1);
    train = data::fashion_mnist(data::Split::train, folder, options.data_dtype());
    if (options.eval) test = data::fashion_mnist(data::Split::test, folder, options.data_dtype());
  }
  return std::make_unique<DatasetFeed>(options, rank, ranks, std::move(train), std::move(test));
}

}  // namespace shoal::cli
