#include "cli/train/feed.h"

#include <torch/data/dataloader.h>
#include <torch/data/datasets/shared.h>

#include "data/fashion_mnist.h"
#include "data/reference.h"
#include "data/text_dataset.h"
#include "models/registry.h"
#include "shoal/data.h"

namespace shoal::cli {
namespace {

// Makes a step's batches before the step, so that the step's time is training alone.
class ReferenceFeed : public Feed {
 public:
  ReferenceFeed(const TrainOptions& options, int rank) : options_(options), rank_(rank) { prepare(0); }

  std::optional<int64_t> steps_per_epoch() const override { return std::nullopt; }
  void begin_epoch(int64_t) override {}
  void prepare(int64_t step) override {
    batches_.clear();
    for (int micro = 0; micro < options_.accumulate; ++micro) {
      batches_.push_back(data::reference_batch(options_.model, options_.size,
                                               {.seed = options_.seed,
                                                .step = static_cast<uint64_t>(step),
                                                .rank = static_cast<uint64_t>(rank_),
                                                .micro = static_cast<uint64_t>(micro)},
                                               options_.batch, options_.data_dtype()));
    }
  }
  data::Batch next(int64_t, int micro) override { return batches_.at(micro); }
  void skip(int64_t) override {}
  void follow(int rank) override { rank_ = rank; }
  std::shared_ptr<data::Dataset> test_data() const override { return nullptr; }

 private:
  const TrainOptions& options_;
  int rank_;
  std::vector<data::Batch> batches_;  // of one step
};

// Samples in memory, read with libtorch's data loader.
class DatasetFeed : public Feed {
 public:
  DatasetFeed(const TrainOptions& options, int rank, int ranks, std::shared_ptr<data::Dataset> train,
              std::shared_ptr<data::Dataset> test)
      : options_(options),
        train_(std::move(train)),
        test_(std::move(test)),
        sampler_(*train_->size(), static_cast<size_t>(ranks), static_cast<size_t>(rank), {.seed = options.seed}),
        batch_(options.batch) {
    if (options.keep_global_batch)
      keep_batch(ranks * options.accumulate * options.batch, options.accumulate * options.batch);
  }

  std::optional<int64_t> steps_per_epoch() const override {
    if (kept_ > 0) return std::max<int64_t>(1, kept_steps(static_cast<int64_t>(sampler_.size())));
    const auto ranks = static_cast<int64_t>(sampler_.num_replicas());
    const auto samples = (static_cast<int64_t>(sampler_.size()) + ranks - 1) / ranks;  // of a whole epoch
    const auto batches = (samples + options_.batch - 1) / options_.batch;
    return std::max<int64_t>(1, batches / options_.accumulate);
  }

  void begin_epoch(int64_t epoch) override {
    sampler_.set_epoch(static_cast<size_t>(epoch));
    open();
  }

  DistributedSampler* sampler() override { return &sampler_; }

  void prepare_epoch(int64_t epoch, int64_t done) override {
    sampler_.set_epoch(static_cast<size_t>(epoch));
    if (done > 0) sampler_.seek(static_cast<size_t>(done * options_.accumulate * options_.batch));
  }

  int64_t steps_left() const override {
    if (kept_ > 0)
      return kept_steps(static_cast<int64_t>(sampler_.size() - std::min(sampler_.size(), sampler_.consumed())));
    const auto samples = static_cast<int64_t>(sampler_.num_samples() - sampler_.index());
    return (samples + batch_ - 1) / batch_ / options_.accumulate;
  }

  void keep_batch(int64_t all, int64_t own) override {
    kept_ = all;
    batch_ = own;
  }

  void open() override {
    loader_ = torch::data::make_data_loader(torch::data::datasets::SharedBatchDataset<data::Dataset>(train_), sampler_,
                                            torch::data::DataLoaderOptions(batch_));
    next_.emplace(loader_->begin());
  }

  bool has_next() override { return *next_ != loader_->end(); }

  data::Batch next(int64_t, int) override {
    // The epoch has fewer batches than one step has micro-batches.
    if (*next_ == loader_->end()) next_.emplace(loader_->begin());
    auto batch = **next_;
    ++*next_;
    return batch;
  }

  void skip(int64_t steps) override {
    for (int64_t i = 0; i < steps * options_.accumulate; ++i) next(0, 0);
  }

  std::shared_ptr<data::Dataset> test_data() const override { return test_; }
  std::optional<size_t> samples() const override { return sampler_.size(); }

 private:
  // Steps that so many samples of all ranks fill, with micro-batches counted as without kept_: the last one may have
  // fewer samples, and what does not fill a step is left out.
  int64_t kept_steps(int64_t samples) const {
    return (samples * options_.accumulate + kept_ - 1) / kept_ / options_.accumulate;
  }

  using Loader =
      torch::data::StatelessDataLoader<torch::data::datasets::SharedBatchDataset<data::Dataset>, DistributedSampler>;
  const TrainOptions& options_;
  std::shared_ptr<data::Dataset> train_;
  std::shared_ptr<data::Dataset> test_;
  DistributedSampler sampler_;
  int64_t batch_;     // of the loader
  int64_t kept_ = 0;  // samples of a step over all ranks; 0: the batch of each rank stays instead
  std::unique_ptr<Loader> loader_;
  std::optional<torch::data::Iterator<data::Batch>> next_;
};

}  // namespace

std::vector<std::filesystem::path> data_files(const TrainOptions& options) {
  std::vector<std::filesystem::path> files;
  if (options.reference_data()) return files;
  for (const auto split : {data::Split::train, data::Split::test}) {
    if (split == data::Split::test && !options.eval) continue;
    if (options.text_data()) {
      data::text_file(options.data_path().value(), models::gpt_config(options.size).context, split);
      files.emplace_back(options.data_path().value());
    } else {
      const auto images_and_labels = data::fashion_mnist_files(split, options.data_path());
      files.insert(files.end(), images_and_labels.begin(), images_and_labels.end());
    }
  }
  return files;
}

Datasets read_datasets(const TrainOptions& options) {
  Datasets read;
  if (options.reference_data()) return read;
  const auto path = options.data_path();
  if (options.text_data()) {
    const auto context = models::gpt_config(options.size).context;
    read.train = data::text_file(path.value(), context, data::Split::train);
    if (options.eval) read.test = data::text_file(path.value(), context, data::Split::test);
  } else {
    read.train = data::fashion_mnist(data::Split::train, path, options.data_dtype());
    if (options.eval) read.test = data::fashion_mnist(data::Split::test, path, options.data_dtype());
  }
  return read;
}

std::unique_ptr<Feed> make_feed(const TrainOptions& options, int rank, int ranks, const Datasets& datasets) {
  if (options.reference_data()) return std::make_unique<ReferenceFeed>(options, rank);
  return std::make_unique<DatasetFeed>(options, rank, ranks, datasets.train, datasets.test);
}

}  // namespace shoal::cli
