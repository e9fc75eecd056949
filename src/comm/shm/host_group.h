#pragma once
// State shared by the operations of one group on this rank.

#include <memory>
#include <string>
#include <vector>

#include "comm/shm/control_block.h"
#include "comm/shm/host_memory.h"
#include "shoal/telemetry.h"

namespace shoal::shm {

struct HostGroup {
  static constexpr int64_t stage_half_bytes = int64_t{512} << 10;  // both halves stay in the second-level cache

  std::string name;
  int rank;
  int size;
  std::shared_ptr<HostMemory> memory;
  std::vector<std::shared_ptr<PeerMemory>> peers;  // by rank of the group; nullptr for this rank
  ControlLayout control;
  std::byte* stage = nullptr;  // staging buffer of this rank, two halves; allocated on first use
  uint64_t staged_rounds = 0;  // number of staged rounds so far, the same on all ranks
  std::shared_ptr<Timeline> timeline{};

  std::byte* at(int of_rank, const Place& place) const {
    return of_rank == rank ? memory->at(place) : peers[of_rank]->at(place);
  }
  void ring_others() const {
    for (const auto& peer : peers) {
      if (peer) peer->ring();
    }
  }
  // Counts this rank in; the rank that completes a round wakes the others.
  void count(std::atomic<uint64_t>& counter) const {
    const auto now = counter.fetch_add(1, std::memory_order_acq_rel) + 1;
    if (now % static_cast<uint64_t>(size) == 0) ring_others();
  }
};

}  // namespace shoal::shm
