#include "elastic/global_batch.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/full.h>
#include <c10/util/ScopeExit.h>
#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "module/sync.h"
#include "shoal/error.h"

namespace shoal {
namespace {

// splitmix64, after Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators" (OOPSLA 2014).
uint64_t mixed(uint64_t value) {
  value += 0x9e3779b97f4a7c15U;
  value = (value ^ (value >> 30U)) * 0xbf58476d1ce4e5b9U;
  value = (value ^ (value >> 27U)) * 0x94d049bb133111ebU;
  return value ^ (value >> 31U);
}

}  // namespace

GlobalBatch::GlobalBatch(World world, int64_t size, int64_t shares, ElasticParts& parts, StepCopies& copies)
    : world_(std::move(world)),
      size_(size),
      first_shares_(shares > 0 ? shares : world_.size()),
      parts_(parts),
      copies_(copies),
      divided_among_(world_.size(), world_.rank()) {}

void GlobalBatch::adopt(int64_t size, int64_t shares, uint64_t seed) {
  size_ = size;
  first_shares_ = shares;
  seed_ = seed;
}

void GlobalBatch::require(const DistributedSampler* sampler) const {
  if (sampler == nullptr) {
    if (size_ == 0) return;
    throw UsageError("Elastic: keep_global_batch needs a sampler: pass it to the constructor");
  }
  if (sampler->num_replicas() != static_cast<size_t>(world_.size()) ||
      sampler->rank() != static_cast<size_t>(world_.rank())) {
    throw UsageError(
        fmt::format("Elastic: the sampler is rank {} of {}'s, and this is rank {} of {}: make it for world.group()",
                    sampler->rank(), sampler->num_replicas(), world_.rank(), world_.size()));
  }
  if (!sampler->options().pad && !sampler->options().drop_last) {
    throw UsageError("Elastic: ranks must have equally many samples: set the sampler's pad or drop_last");
  }
}

void GlobalBatch::begin() {
  if (size_ == 0) return;
  share_buffers();
  auto seed = at::full({1}, static_cast<int64_t>(at::detail::getDefaultCPUGenerator().current_seed()), at::kLong);
  world_.group().broadcast(seed, 0, {-1, -1, "Elastic's seed"}).wait();
  seed_ = static_cast<uint64_t>(seed.item<int64_t>());
}

int64_t GlobalBatch::own_size() const {
  if (size_ > 0) return size_ / first_shares_ * own_shares();
  throw UsageError("Elastic: batch_size() is for keep_global_batch: set that option, or use the loader's own size");
}

// They are right as long as they begin where the rest does, as one of the same ranks.
void GlobalBatch::outdate_copies(DistributedSampler& sampler, size_t taken) {
  const auto of = std::pair(world_.size(), world_.rank());
  const bool elsewhere = taken != 0 && taken != sampler.consumed();
  if (std::exchange(divided_among_, of) != of || elsewhere) sampler.outdate_copies();
}

void GlobalBatch::divide(DistributedSampler& sampler, size_t taken) {
  const auto ranks = static_cast<size_t>(world_.size());
  const auto rank = static_cast<size_t>(world_.rank());
  divided_at_ = taken;
  if (size_ == 0) return sampler.redistribute(ranks, rank, taken);
  sampler.redistribute_slices(static_cast<size_t>(first_shares_), ranks, rank,
                              static_cast<size_t>(size_ / first_shares_), taken);
}

void GlobalBatch::require(int64_t samples, const DistributedSampler& sampler, size_t taken) const {
  const auto all = static_cast<int64_t>(sampler.num_samples());
  if (size_ == 0) {
    if (samples >= 1 && samples <= all) return;
    throw UsageError(
        fmt::format("Elastic: {} samples in a step, and this rank has {}: give the size of its batch", samples, all));
  }
  const auto done = static_cast<int64_t>(taken - divided_at_) / shares() * own_shares();
  const auto expected = std::min(own_size(), all - done);
  if (samples == expected && samples > 0) return;
  throw UsageError(
      fmt::format("Elastic: {} samples in a step, and with keep_global_batch = {} this rank has {}: make each loader "
                  "with batch_size() samples, and call in_epoch() before",
                  samples, size_, expected));
}

void GlobalBatch::weigh(double shares) {
  if (size_ > 0) parts_.set_share(shares / static_cast<double>(first_shares_));
}

void GlobalBatch::end_step() {
  parts_.set_share(std::nullopt);
}

// Rank 0's, which are those of share 0.
void GlobalBatch::share_buffers() {
  if (size_ > 0) sync_buffers(world_.group(), parts_.tensors().buffers, 0, parts_.step());
}

void GlobalBatch::seed(int64_t step, int64_t share) const {
  if (size_ == 0) return;
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  generator.set_current_seed(mixed(mixed(seed_ + static_cast<uint64_t>(step)) + static_cast<uint64_t>(share)));
}

void GlobalBatch::compute(int64_t step, const std::function<void()>& compute) {
  weigh(static_cast<double>(own_shares()));
  seed(step, world_.rank());
  compute();
  share_buffers();
}

// Each share begins with the buffers that the step began with, which are equal on all ranks. Those of share 0 stay: all
// ranks have them before the commit, so that none is needed for them.
void GlobalBatch::compute(int64_t step, int64_t samples,
                          const std::function<void(int64_t begin, int64_t end)>& compute) {
  weigh(1);
  parts_.compute_shares(size_ > 0);
  const auto end = c10::make_scope_exit([this] { parts_.compute_shares(false); });
  const auto count = own_shares();
  const bool one_more = count > shares_of(world_.size() - 1);
  const bool one_less = count < shares_of(0);
  std::vector<at::Tensor> buffers;
  if (one_less) parts_.meet_behind_share();
  for (int64_t i = 0; i < count; ++i) {
    if (i > 0) copies_.restore_buffers();
    seed(step, world_.rank() + i * world_.size());
    {
      const auto scope = parts_.no_sync(i + 1 < count);
      compute(i * samples / count, (i + 1) * samples / count);
    }
    if (i == 0 && one_more) parts_.meet_behind_share();
    if (i == 0 && count > 1) buffers = copies_.present_buffers();
  }
  if (count > 1) copies_.set_buffers(buffers);
  share_buffers();
}

}  // namespace shoal
