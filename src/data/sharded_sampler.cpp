#include "data/sharded_sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/tensor.h>
#include <fmt/format.h>
#include <torch/serialize/archive.h>

#include <algorithm>

#include "shoal/error.h"

namespace shoal::data {
namespace {

// Number of places in the shared order that are distributed to ranks.
size_t places(size_t size, size_t world, Remainder remainder) {
  switch (remainder) {
    case Remainder::wrap:
      return (size + world - 1) / world * world;
    case Remainder::drop:
      return size / world * world;
    case Remainder::keep:
      break;
  }
  return size;
}

int64_t read_integer(torch::serialize::InputArchive& archive, const char* name) {
  auto value = at::empty({}, at::kLong);
  archive.read(name, value, /*is_buffer=*/true);
  return value.item<int64_t>();
}

}  // namespace

ShardedSampler::ShardedSampler(size_t size, const SamplerOptions& options)
    : DistributedSampler(size, options.world, options.rank, options.remainder == Remainder::wrap),
      seed_(options.seed),
      order_(options.order),
      remainder_(options.remainder) {
  if (options.rank >= options.world) {
    throw UsageError(fmt::format("sampler: rank {} of {}", options.rank, options.world));
  }
  ShardedSampler::reset();
}

void ShardedSampler::reset(std::optional<size_t> new_size) {
  if (new_size == 0 || size_ == 0) throw UsageError("sampler: a data set without samples");
  size_ = new_size.value_or(size_);
  const auto count = static_cast<int64_t>(size_);
  const auto order = order_ == Order::shuffled
                         ? at::randperm(count, at::detail::createCPUGenerator(seed_ + epoch_), at::kLong)
                         : at::arange(count, at::kLong);
  const int64_t* shuffled = order.const_data_ptr<int64_t>();
  indices_.clear();
  for (size_t place = rank_; place < places(size_, num_replicas_, remainder_); place += num_replicas_) {
    indices_.push_back(static_cast<size_t>(shuffled[place % size_]));
  }
  index_ = 0;
}

std::optional<std::vector<size_t>> ShardedSampler::next(size_t batch_size) {
  if (index_ == indices_.size()) return std::nullopt;
  const size_t end = std::min(index_ + batch_size, indices_.size());
  std::vector<size_t> batch(indices_.begin() + static_cast<std::ptrdiff_t>(index_),
                            indices_.begin() + static_cast<std::ptrdiff_t>(end));
  index_ = end;
  return batch;
}

void ShardedSampler::seek(size_t index) {
  if (index > indices_.size()) {
    throw UsageError(fmt::format("sampler: cannot resume after {} samples: this rank has {}", index, indices_.size()));
  }
  index_ = index;
}

void ShardedSampler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("epoch", at::tensor(static_cast<int64_t>(epoch_)), /*is_buffer=*/true);
  archive.write("index", at::tensor(static_cast<int64_t>(index_)), /*is_buffer=*/true);
}

void ShardedSampler::load(torch::serialize::InputArchive& archive) {
  set_epoch(static_cast<size_t>(read_integer(archive, "epoch")));
  reset();
  seek(static_cast<size_t>(read_integer(archive, "index")));
}

}  // namespace shoal::data
