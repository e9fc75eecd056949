#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/tensor.h>
#include <fmt/format.h>
#include <torch/serialize/archive.h>

#include <algorithm>

#include "loop/sampler_state.h"
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
      state_(new State{.options = options}) {
  check_rank(rank, num_replicas);
  check(options);
  DistributedSampler::reset();
}

DistributedSampler::DistributedSampler(size_t size, const Group& group, const DistributedSamplerOptions& options)
    : DistributedSampler(size, static_cast<size_t>(group.size()), static_cast<size_t>(group.rank()), options) {}

DistributedSampler::DistributedSampler(const DistributedSampler& other)
    : torch::data::samplers::DistributedSampler<>(other), state_(std::make_unique<State>(*other.state_)) {}

DistributedSampler& DistributedSampler::operator=(const DistributedSampler& other) {
  torch::data::samplers::DistributedSampler<>::operator=(other);
  state_ = std::make_unique<State>(*other.state_);
  return *this;
}

DistributedSampler::~DistributedSampler() = default;

bool DistributedSampler::names_epochs() const {
  return state_->named || epoch_ > 0;
}

void DistributedSampler::outdate_copies() {
  state_->division.outdate();
}

void DistributedSampler::set_epoch(size_t epoch) {
  state_->named = true;
  torch::data::samplers::DistributedSampler<>::set_epoch(epoch);
  publish_position();
}

void DistributedSampler::publish_position() {
  const auto& start = state_->start;
  state_->position.publish(epoch_, start && start->sought ? start : nullptr);
}

void DistributedSampler::reset(std::optional<size_t> new_size) {
  std::shared_ptr<EpochStart> sought;
  if (state_->position.receive(epoch_, sought) && sought) state_->start = std::move(sought);
  begin_epoch(new_size);
}

void DistributedSampler::begin_epoch(std::optional<size_t> new_size) {
  auto& state = *state_;
  if (state.division.outdated()) {
    throw UsageError(fmt::format(
        "DistributedSampler: this copy, as rank {} of {}, has the division of the job's former ranks, and Elastic "
        "has divided the sampler anew: make the data loader, or the copy, within while (elastic.in_epoch())",
        rank_, num_replicas_));
  }
  if (new_size == 0 || size_ == 0) throw UsageError("DistributedSampler: the data set has no samples");
  size_ = new_size.value_or(size_);
  const auto count = static_cast<int64_t>(size_);
  const auto order = state.options.shuffle
                         ? at::randperm(count, at::detail::createCPUGenerator(state.options.seed + epoch_), at::kLong)
                         : at::arange(count, at::kLong);
  const int64_t* shuffled = order.const_data_ptr<int64_t>();
  const auto* start = state.start_of(epoch_);
  state.divided = epoch_;
  state.first = start != nullptr ? std::min(start->first, size_) : 0;
  const size_t end = state.first + places(size_ - state.first, num_replicas_, state.options);
  state.indices.clear();
  const size_t block = state.slices ? state.slices->batch * num_replicas_ : std::max<size_t>(1, end - state.first);
  const size_t stride = state.slices ? state.slices->ranks : num_replicas_;
  for (size_t begin = state.first; begin < end; begin += block) {
    const size_t block_end = std::min(end, begin + block);
    for (size_t slice = rank_; slice < num_replicas_; slice += stride) {
      for (size_t place = begin + slice; place < block_end; place += num_replicas_) {
        state.indices.push_back(static_cast<size_t>(shuffled[place % size_]));
      }
    }
  }
  state.index = start != nullptr && !start->index_used ? std::min(start->index, state.indices.size()) : 0;
}

std::optional<std::vector<size_t>> DistributedSampler::next(size_t batch_size) {
  auto& state = *state_;
  if (state.divided != epoch_) begin_epoch();
  const auto& indices = state.indices;
  const size_t end = state.index + std::min(batch_size, indices.size() - state.index);
  if (auto* start = state.start_of(epoch_); end == indices.size() && start != nullptr) start->index_used = true;
  if (state.index == indices.size()) return std::nullopt;
  std::vector<size_t> batch(indices.begin() + static_cast<std::ptrdiff_t>(state.index),
                            indices.begin() + static_cast<std::ptrdiff_t>(end));
  state.index = end;
  return batch;
}

size_t DistributedSampler::first_place() const {
  return state_->divided == epoch_ ? state_->first : 0;
}

size_t DistributedSampler::places_between(size_t first, size_t end) const {
  const size_t stride = state_->slices ? state_->slices->ranks : num_replicas_;
  size_t count = 0;
  for (size_t slice = rank_; slice < num_replicas_ && first + slice < end; slice += stride) {
    count += (end - first - slice + num_replicas_ - 1) / num_replicas_;
  }
  return count;
}

size_t DistributedSampler::samples_from(size_t first) const {
  return places_between(first, first + places(size_ - first, num_replicas_, state_->options));
}

size_t DistributedSampler::num_samples() const {
  return samples_from(first_place());
}

size_t DistributedSampler::unpadded() const {
  const size_t first = first_place();
  return places_between(first, std::min(size_, first + places(size_ - first, num_replicas_, state_->options)));
}

size_t DistributedSampler::remaining() const {
  const auto* start = state_->start_of(epoch_);
  const size_t samples = samples_from(start != nullptr ? std::min(start->first, size_) : 0);
  return samples - (start != nullptr && !start->index_used ? std::min(start->index, samples) : 0);
}

size_t DistributedSampler::index() const {
  return state_->divided == epoch_ ? state_->index : 0;
}

size_t DistributedSampler::consumed() const {
  return first_place() + index() / slices() * num_replicas_;
}

const DistributedSamplerOptions& DistributedSampler::options() const {
  return state_->options;
}

void DistributedSampler::set_options(const DistributedSamplerOptions& options) {
  check(options);
  state_->options = options;
  if (state_->divided == epoch_) {
    const auto start = state_->start;
    begin_at(state_->first, state_->index);
    state_->start = start;
  } else {
    begin_epoch();
  }
}

void DistributedSampler::redistribute(size_t num_replicas, size_t rank, size_t consumed) {
  check_rank(rank, num_replicas);
  num_replicas_ = num_replicas;
  rank_ = rank;
  state_->slices.reset();
  state_->division.renew();
  begin_at(consumed, 0);
}

void DistributedSampler::redistribute_slices(size_t num_replicas, size_t ranks, size_t rank, size_t batch,
                                             size_t consumed) {
  if (rank >= ranks || ranks > num_replicas || batch == 0) {
    throw UsageError(fmt::format("DistributedSampler: rank {} of {} with {} slices of {} samples in a step", rank,
                                 ranks, num_replicas, batch));
  }
  num_replicas_ = num_replicas;
  rank_ = rank;
  state_->slices = {ranks, batch};
  state_->division.renew();
  begin_at(consumed, 0);
}

size_t DistributedSampler::slices() const {
  return state_->slices ? (num_replicas_ - rank_ + state_->slices->ranks - 1) / state_->slices->ranks : 1;
}

void DistributedSampler::begin_at(size_t first, size_t index, bool sought) {
  state_->start.reset(new EpochStart{epoch_, first, index, sought});
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
  publish_position();
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
  publish_position();
}

DistributedSampler DistributedSampler::clone() const {
  auto copy = *this;
  copy.state_->position = SharedPosition();
  if (const auto& start = state_->start)
    copy.state_->start.reset(
        new EpochStart{start->epoch, start->first, start->index, start->sought, start->index_used.load()});
  return copy;
}

}  // namespace shoal
