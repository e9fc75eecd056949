#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/tensor.h>
#include <fmt/format.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <mutex>

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

void check(const DistributedSamplerOptions& options) {
  if (!options.drop_last || options.pad) return;
  throw UsageError("DistributedSampler: drop_last with pad = false: give one of them");
}

void check_rank(size_t rank, size_t num_replicas) {
  if (rank >= num_replicas) throw UsageError(fmt::format("DistributedSampler: rank {} of {}", rank, num_replicas));
}

}  // namespace

DistributedSampler::DistributedSampler(size_t size, size_t num_replicas, size_t rank,
                                       const DistributedSamplerOptions& options)
    : torch::data::samplers::DistributedSampler<>(size, num_replicas, rank, /*allow_duplicates=*/!options.drop_last),
      options_(options) {
  check_rank(rank, num_replicas);
  check(options);
  DistributedSampler::reset();
}

DistributedSampler::DistributedSampler(size_t size, const Group& group, const DistributedSamplerOptions& options)
    : DistributedSampler(size, static_cast<size_t>(group.size()), static_cast<size_t>(group.rank()), options) {}

void DistributedSampler::set_epoch(size_t epoch) {
  named_ = true;
  torch::data::samplers::DistributedSampler<>::set_epoch(epoch);
  say();
}

struct DistributedSampler::Words::Place {
  std::shared_ptr<Place> copied_from;
  std::mutex mutex{};   // data loaders may run on threads of their own
  uint64_t number = 0;  // of what was said last; 0: nothing
  size_t epoch = 0;
  std::shared_ptr<Begin> begin{};
};

DistributedSampler::Words::Words() : own_(std::make_shared<Place>()) {}

DistributedSampler::Words::Words(const Words& of) : own_(new Place{.copied_from = of.own_}), heard_(of.heard_) {}

DistributedSampler::Words& DistributedSampler::Words::operator=(const Words& of) {
  own_.reset(new Place{.copied_from = of.own_});
  heard_ = of.heard_;
  return *this;
}

void DistributedSampler::Words::say(size_t epoch, std::shared_ptr<Begin> begin) {
  static std::atomic<uint64_t> numbers = 0;
  const std::scoped_lock lock(own_->mutex);
  own_->epoch = epoch;
  own_->begin = std::move(begin);
  heard_ = own_->number = ++numbers;
}

bool DistributedSampler::Words::hear(size_t& epoch, std::shared_ptr<Begin>& begin) {
  for (auto* place = own_.get(); place != nullptr; place = place->copied_from.get()) {
    const std::scoped_lock lock(place->mutex);
    if (place->number == 0) continue;
    if (place->number <= heard_) return false;
    heard_ = place->number;
    epoch = place->epoch;
    begin = place->begin;
    return true;
  }
  return false;
}

void DistributedSampler::hear() {
  std::shared_ptr<Begin> sought;
  if (words_.hear(epoch_, sought) && sought) begin_ = std::move(sought);
}

void DistributedSampler::reset(std::optional<size_t> new_size) {
  hear();
  begin_epoch(new_size);
}

void DistributedSampler::begin_epoch(std::optional<size_t> new_size) {
  if (job_division_.outdated()) {
    throw UsageError(fmt::format(
        "DistributedSampler: this copy, as rank {} of {}, has the division of the job's former ranks, and Elastic "
        "has divided the sampler anew: make the data loader, or the copy, within while (elastic.in_epoch())",
        rank_, num_replicas_));
  }
  if (new_size == 0 || size_ == 0) throw UsageError("DistributedSampler: the data set has no samples");
  size_ = new_size.value_or(size_);
  const auto count = static_cast<int64_t>(size_);
  const auto order = options_.shuffle
                         ? at::randperm(count, at::detail::createCPUGenerator(options_.seed + epoch_), at::kLong)
                         : at::arange(count, at::kLong);
  const int64_t* shuffled = order.const_data_ptr<int64_t>();
  divided_ = epoch_;
  first_ = begin() != nullptr ? std::min(begin_->first, size_) : 0;
  const size_t end = first_ + places(size_ - first_, num_replicas_, options_);
  indices_.clear();
  const size_t block = stands_in_ ? stands_in_->batch * num_replicas_ : std::max<size_t>(1, end - first_);
  const size_t stride = stands_in_ ? stands_in_->ranks : num_replicas_;
  for (size_t begin = first_; begin < end; begin += block) {
    const size_t block_end = std::min(end, begin + block);
    for (size_t share = rank_; share < num_replicas_; share += stride) {
      for (size_t place = begin + share; place < block_end; place += num_replicas_) {
        indices_.push_back(static_cast<size_t>(shuffled[place % size_]));
      }
    }
  }
  index_ = begin() != nullptr && !begin_->index_used ? std::min(begin_->index, indices_.size()) : 0;
}

std::optional<std::vector<size_t>> DistributedSampler::next(size_t batch_size) {
  if (divided_ != epoch_) begin_epoch();
  const size_t end = index_ + std::min(batch_size, indices_.size() - index_);
  if (end == indices_.size() && begin() != nullptr) begin_->index_used = true;
  if (index_ == indices_.size()) return std::nullopt;
  std::vector<size_t> batch(indices_.begin() + static_cast<std::ptrdiff_t>(index_),
                            indices_.begin() + static_cast<std::ptrdiff_t>(end));
  index_ = end;
  return batch;
}

size_t DistributedSampler::places_between(size_t first, size_t end) const {
  const size_t stride = stands_in_ ? stands_in_->ranks : num_replicas_;
  size_t count = 0;
  for (size_t share = rank_; share < num_replicas_ && first + share < end; share += stride) {
    count += (end - first - share + num_replicas_ - 1) / num_replicas_;
  }
  return count;
}

size_t DistributedSampler::samples_from(size_t first) const {
  return places_between(first, first + places(size_ - first, num_replicas_, options_));
}

size_t DistributedSampler::unpadded() const {
  const size_t first = first_place();
  return places_between(first, std::min(size_, first + places(size_ - first, num_replicas_, options_)));
}

size_t DistributedSampler::left() const {
  const size_t samples = samples_from(begin() != nullptr ? std::min(begin_->first, size_) : 0);
  return samples - (begin() != nullptr && !begin_->index_used ? std::min(begin_->index, samples) : 0);
}

void DistributedSampler::set_options(const DistributedSamplerOptions& options) {
  check(options);
  options_ = options;
  if (divided_ == epoch_) {
    const auto begin = begin_;
    begin_at(first_, index_);
    begin_ = begin;
  } else {
    begin_epoch();
  }
}

void DistributedSampler::divide(size_t num_replicas, size_t rank, size_t taken) {
  check_rank(rank, num_replicas);
  num_replicas_ = num_replicas;
  rank_ = rank;
  stands_in_.reset();
  job_division_.renew();
  begin_at(taken, 0);
}

void DistributedSampler::divide_shares(size_t num_replicas, size_t ranks, size_t rank, size_t batch, size_t taken) {
  if (rank >= ranks || ranks > num_replicas || batch == 0) {
    throw UsageError(fmt::format("DistributedSampler: rank {} of {} with {} shares of {} samples in a step", rank,
                                 ranks, num_replicas, batch));
  }
  num_replicas_ = num_replicas;
  rank_ = rank;
  stands_in_ = {ranks, batch};
  job_division_.renew();
  begin_at(taken, 0);
}

size_t DistributedSampler::shares() const {
  return stands_in_ ? (num_replicas_ - rank_ + stands_in_->ranks - 1) / stands_in_->ranks : 1;
}

void DistributedSampler::begin_at(size_t first, size_t index, bool sought) {
  begin_.reset(new Begin{epoch_, first, index, sought});
  begin_epoch();
}

void DistributedSampler::require_within(size_t index, size_t first) const {
  const size_t samples = samples_from(first);
  if (index <= samples) return;
  throw UsageError(
      fmt::format("DistributedSampler: cannot begin behind {} samples: this rank has {}. An epoch's last batch may be "
                  "smaller: seek(min(batches_done * batch_size, {}))",
                  index, samples, samples));
}

void DistributedSampler::seek(size_t index) {
  const size_t first = first_place();
  require_within(index, first);
  begin_at(first, index, /*sought=*/true);
  say();
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("epoch", at::tensor(static_cast<int64_t>(epoch_)), /*is_buffer=*/true);
  archive.write("index", at::tensor(static_cast<int64_t>(index())), /*is_buffer=*/true);
  archive.write("first", at::tensor(static_cast<int64_t>(first_place())), /*is_buffer=*/true);
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  const auto epoch = read_count(archive, "epoch");
  const auto index = read_count(archive, "index");
  auto saved = at::zeros({}, at::kLong);
  archive.try_read("first", saved, /*is_buffer=*/true);  // archives of older versions have none
  const auto first = std::min(size_, static_cast<size_t>(std::max<int64_t>(0, saved.item<int64_t>())));
  require_within(index, first);
  epoch_ = epoch;
  begin_at(first, index, /*sought=*/true);
  say();
}

DistributedSampler DistributedSampler::clone() const {
  auto copy = *this;
  copy.words_ = Words();
  if (begin_)
    copy.begin_.reset(
        new Begin{begin_->epoch, begin_->first, begin_->index, begin_->sought, begin_->index_used.load()});
  return copy;
}

}  // namespace shoal
