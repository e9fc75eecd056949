#pragma once
// State of a DistributedSampler: its indices, and what it shares with its copies.

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "shoal/data.h"

namespace shoal {

// Place where an epoch begins, with this rank behind so many samples of it. Shared with copies.
struct EpochStart {
  size_t epoch;
  size_t first;
  size_t index;
  bool sought = false;                   // by seek() or load()
  std::atomic<bool> index_used = false;  // a pass that began behind them has come to its end
};

// Position that set_epoch() and seek() publish to copies that there are already. A copy receives from the sampler that
// it was copied from, and what that one receives, until something is published by itself.
class SharedPosition {
 public:
  SharedPosition();
  SharedPosition(const SharedPosition& of);
  SharedPosition& operator=(const SharedPosition& of);
  ~SharedPosition() = default;
  void publish(size_t epoch, std::shared_ptr<EpochStart> start);
  // What is new since the last call, or the copy; false: nothing. start: nullptr: none was sought.
  bool receive(size_t& epoch, std::shared_ptr<EpochStart>& start);

 private:
  struct Place;
  std::shared_ptr<Place> own_;
  uint64_t received_ = 0;
};

// Ranks that there are, and the samples of a slice in a step.
struct SliceAssignment {
  size_t ranks;
  size_t batch;
};

// Division among an elastic job's ranks. Copies share the number of the newest one.
class JobDivision {
 public:
  void outdate() { ++*newest_; }
  void renew() { own_ = *newest_; }
  bool outdated() const { return own_ != *newest_; }

 private:
  std::shared_ptr<std::atomic<uint64_t>> newest_ = std::make_shared<std::atomic<uint64_t>>(0);
  uint64_t own_ = 0;
};

struct DistributedSampler::State {
  DistributedSamplerOptions options;
  std::vector<size_t> indices{};
  size_t index = 0;
  size_t divided = 0;  // epoch whose indices these are
  size_t first = 0;    // place at which their division begins
  bool named = false;  // set_epoch() was called
  std::shared_ptr<EpochStart> start{};
  SharedPosition position{};
  std::optional<SliceAssignment> slices{};  // none: num_replicas() ranks
  JobDivision division{};

  // The beginning of `epoch`, unless that is its first place.
  EpochStart* start_of(size_t epoch) const { return start && start->epoch == epoch ? start.get() : nullptr; }
};

}  // namespace shoal
