#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/tensor.h>
#include <fmt/format.h>
#include <torch/serialize/archive.h>

#include <algorithm>

#include "shoal/data.h"
#include "shoal/error.h"

namespace shoal {
namespace {

// Places in the common order that the ranks share out.
size_t places(size_t size, size_t ranks, const DistributedSamplerOptions& options) {
  if (options.drop_last) return size / ranks * ranks;
  return options.pad ? (size + ranks - 1) / ranks * ranks : size;
}

size_t read_count(torch::serialize::InputArchive& archive, const char* name) {
  auto value = at::empty({}, at::kLong);
  archive.read(name, value, /*is_buffer=*/true);
  const auto count = value.item<int64_t>();
  if (count < 0) throw UsageError(fmt::format("DistributedSampler: the saved {} is {}", name, count));
  return static_cast<size_t>(count);
}

}  // namespace

DistributedSampler::DistributedSampler(size_t size, size_t num_replicas, size_t rank,
                                       const DistributedSamplerOptions& options)
    : torch::data::samplers::DistributedSampler<>(size, num_replicas, rank, /*allow_duplicates=*/!options.drop_last),
      options_(options) {
  if (rank >= num_replicas) throw UsageError(fmt::format("DistributedSampler: rank {} of {}", rank, num_replicas));
  if (options.drop_last && !options.pad) {
    throw UsageError("DistributedSampler: drop_last with pad = false: give one of them");
  }
  DistributedSampler::reset();
}

DistributedSampler::DistributedSampler(size_t size, const Group& group, const DistributedSamplerOptions& options)
    : DistributedSampler(size, static_cast<size_t>(group.size()), static_cast<size_t>(group.rank()), options) {}

void DistributedSampler::reset(std::optional<size_t> new_size) {
  if (new_size == 0 || size_ == 0) throw UsageError("DistributedSampler: the data set has no samples");
  size_ = new_size.value_or(size_);
  const auto count = static_cast<int64_t>(size_);
  const auto order = options_.shuffle
                         ? at::randperm(count, at::detail::createCPUGenerator(options_.seed + epoch_), at::kLong)
                         : at::arange(count, at::kLong);
  const int64_t* shuffled = order.const_data_ptr<int64_t>();
  indices_.clear();
  for (size_t place = rank_; place < places(size_, num_replicas_, options_); place += num_replicas_) {
    if (place < size_) unpadded_ = indices_.size() + 1;
    indices_.push_back(static_cast<size_t>(shuffled[place % size_]));
  }
  if (rank_ >= size_ || indices_.empty()) unpadded_ = 0;
  index_ = begin_ && begin_->first == epoch_ ? std::min(begin_->second, indices_.size()) : 0;
  begin_.reset();
}

std::optional<std::vector<size_t>> DistributedSampler::next(size_t batch_size) {
  if (index_ == indices_.size()) return std::nullopt;
  const size_t end = std::min(index_ + batch_size, indices_.size());
  std::vector<size_t> batch(indices_.begin() + static_cast<std::ptrdiff_t>(index_),
                            indices_.begin() + static_cast<std::ptrdiff_t>(end));
  index_ = end;
  return batch;
}

void DistributedSampler::seek(size_t index) {
  begin_.reset();
  reset();
  if (index > indices_.size()) {
    throw UsageError(
        fmt::format("DistributedSampler: cannot begin behind {} samples: this rank has {}", index, indices_.size()));
  }
  index_ = index;
  begin_ = {epoch_, index};
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("epoch", at::tensor(static_cast<int64_t>(epoch_)), /*is_buffer=*/true);
  archive.write("index", at::tensor(static_cast<int64_t>(index_)), /*is_buffer=*/true);
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  const auto epoch = read_count(archive, "epoch");
  const auto index = read_count(archive, "index");
  set_epoch(epoch);
  seek(index);
}

}  // namespace shoal
