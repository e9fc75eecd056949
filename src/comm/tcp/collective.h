#pragma once
// Collective on the tcp transport, from its call to its end. Never waits.
//
//   entered    this rank has told the others what it calls
//   begun      all ranks have told the same; data larger than bytes_with_entry travel from now on
//   finished   this rank has its result, and the system has all that others need of it

#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "comm/tcp/frame.h"
#include "comm/tcp/schedule.h"
#include "shoal/detail/call.h"

namespace shoal::tcp {

// An entry as it comes from a rank: an Entry, and what follows it.
using EntryBytes = std::string;

class Collective {
 public:
  // staging: memory of staging_bytes() that no other operation uses while this one is under way.
  Collective(Call call, uint64_t number, int rank, const std::vector<int>& world_ranks, std::byte* staging);

  uint64_t number() const { return number_; }
  // For rank `to`.
  EntryBytes entry(int to) const;
  // All ranks have entered. entries: by rank. DisagreeError if they call different things.
  void begin(const std::vector<EntryBytes>& entries);
  bool begun() const { return begun_; }
  // Read by waiting threads without the transport's lock.
  bool finished() const { return finished_; }

  // The next segment for a rank, if it may be sent now. It is on its way until sent().
  std::optional<Segment> next_to(int rank);
  void on_its_way() { ++on_its_way_; }
  void sent();
  // Memory for the next segment from a rank; nothing if it is still in use. std::runtime_error if that rank has to send
  // nothing, or another number of bytes.
  std::optional<std::byte*> place_for(int rank, uint64_t bytes);
  void received(int rank);
  // Whether this operation still needs something from that rank, or has something for it.
  bool concerns(int rank) const { return !schedule_.sends[rank].empty() || !schedule_.receives[rank].empty(); }
  // Whether it needs one that has entered: before all have, small data of it are there already.
  bool needs(int rank) const { return begun_ ? concerns(rank) : !schedule_.whole && concerns(rank); }

 private:
  void check(const std::vector<EntryBytes>& entries) const;
  void take_data(const EntryBytes& entry, int rank);
  void complete_rounds();
  void look_whether_finished();

  const Call call_;
  const uint64_t number_;
  const int rank_;
  const std::vector<int>& world_ranks_;
  Schedule schedule_;
  std::vector<uint64_t> listed_;  // see Entry
  std::vector<double> factors_;   // by rank
  int64_t rounds_done_ = 0;
  int64_t on_its_way_ = 0;
  bool begun_ = false;
  std::atomic<bool> finished_ = false;
};

// The entry, once its sizes are checked. std::runtime_error if a rank of this version would not send it.
Entry read_entry(const EntryBytes& bytes, size_t ranks);

}  // namespace shoal::tcp
