#include "comm/rendezvous/liveness.h"

#include <fmt/format.h>

#include <cstdio>
#include <thread>

#include "base/printable.h"
#include "shoal/detail/clock.h"

namespace shoal {

Liveness::Liveness(const Meeting& meeting, const Placement& placement, std::shared_ptr<shm::HostMemory> memory,
                   int stopped_timeout_seconds)
    : meeting_(&meeting),
      memory_(std::move(memory)),
      key_(meeting.failure_key),
      own_rank_(placement.rank),
      stopped_timeout_(stopped_timeout_seconds),
      stopped_since_(meeting.peers.size()) {
  open_peers();
}

// A peer that has ended can no longer be opened, and may have blamed another.
void Liveness::open_peers() const {
  if (!memory_) return;
  const auto& peers = meeting_->peers;
  for (const auto& peer : peers) {
    if (&peer == &peers[own_rank_] || peer.host != peers[own_rank_].host) continue;
    try {
      memory_->peer(peer.page);
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): it has ended already, or may not be opened
    }
  }
}

std::optional<Fault> Liveness::check(const std::vector<int>& world_ranks) {
  const auto& peers = meeting_->peers;
  for (const int rank : world_ranks) {
    if (rank == own_rank_ || peers[rank].host != peers[own_rank_].host) continue;
    const auto state = state_of(peers[rank].process);
    if (state == ProcessState::gone) {
      auto first = first_failure();
      if (first) return first;
      const int cause = cause_of(rank);
      return Fault{cause, fmt::format("rank {} (pid {}) is gone: it was killed, crashed or ended early", cause,
                                      peers[cause].process.pid)};
    }
    const std::lock_guard lock(mutex_);
    auto& since = stopped_since_[rank];
    if (state == ProcessState::running) {
      since.reset();
    } else if (!since) {
      since = Clock::now();
    } else if (Clock::now() - *since >= stopped_timeout_) {
      return Fault{rank, fmt::format("rank {} (pid {}) has been stopped by a signal for {} s", rank,
                                     peers[rank].process.pid, stopped_timeout_.count())};
    }
  }
  return std::nullopt;
}

int Liveness::cause_of(int gone) const {
  if (!memory_) return gone;
  try {
    const int blamed = memory_->peer(meeting_->peers[gone].page)->blamed();
    const bool is_gone =
        blamed >= 0 && blamed != own_rank_ && state_of(meeting_->peers[blamed].process) == ProcessState::gone;
    return is_gone ? blamed : gone;
  } catch (const std::exception&) {
    return gone;  // its memory was not opened while it lived
  }
}

void Liveness::publish(int world_rank, const std::string& text) {
  if (memory_ && world_rank >= 0) memory_->blame(world_rank);
  if (!meeting_->store) return;
  try {
    store_set_once(*meeting_->store, key_, text);
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the store may have died with the peer
  }
  stay_for_others();
}

void Liveness::stay_for_others() const {
  if (meeting_->server) std::this_thread::sleep_for(std::chrono::milliseconds(600));
}

std::optional<Fault> Liveness::first_failure() {
  if (!meeting_->store) return std::nullopt;
  try {
    const auto text = store_try_get(*meeting_->store, key_);
    if (!text) return std::nullopt;
    Fault fault{-1, printable(*text)};
    std::sscanf(text->c_str(), "rank %d", &fault.world_rank);  // NOLINT(cert-err34-c): -1 stays when it does not match
    return fault.world_rank == own_rank_ ? std::nullopt : std::optional(fault);
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

}  // namespace shoal
