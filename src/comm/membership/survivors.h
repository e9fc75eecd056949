#pragma once
// Ranks of an elastic job as they see each other through shared memory, without operations of a group.

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "comm/shm/host_memory.h"
#include "shoal/group.h"

namespace shoal {

struct WorldState;
class GenerationWatch;

// Waits for words in shared memory that a death does not end: whoever waits decides what a death means. For a group of
// ranks of a generation that are all of this host.
class Survivors {
 public:
  explicit Survivors(const Group& group);

  // Whether the rank's process has ended. What it has written is complete then, and does not change any more.
  bool ended(int rank) const;
  // Whether the rank does nothing more in this generation: it has ended, or has given the generation up.
  bool absent(int rank) const;
  // The rank that acts for those that are absent: the lowest that is not. At any time, one at most takes itself for it.
  int acting_rank() const;

  // Wakes the others.
  void ring() const;
  // Returns once `done`, which is asked when another rank has rung or ended. JobLost that begins with `what` after the
  // world's timeout: what this rank has written down counts for the others, so it must not go on in another generation.
  // late: whether a rank's part is waited for. By the rule for stragglers, the rank that owes it is killed after twice
  // the limit: itself, or the acting rank if it is absent.
  void wait(const std::string& what, const std::function<bool()>& done,
            const std::function<bool(int rank)>& late) const;
  // The same, but false after the time that waits in the group are limited to, if that is shorter.
  bool wait_in_time(const std::string& what, const std::function<bool()>& done) const;

  // Place of this rank's memory for the others; nothing for memory that they cannot read.
  std::optional<shm::Place> place_of(const void* data, size_t bytes) const;
  // Memory of another rank. Also after its death, for what was there at the last map_all() of this rank.
  std::byte* at(int rank, const shm::Place& place) const;
  // Number of arenas that this rank has; it grows where memory is added that the others have not mapped.
  uint32_t arenas() const;
  // Maps all memory that the other ranks have at present. CommError if one of them has ended.
  void map_all() const;

 private:
  shm::PeerMemory& peer(int rank) const;
  int in_world(int rank) const { return group_.world_rank(rank); }
  // awaited: for whom it waits, in words. look: called about every 100 ms.
  bool wait_until_then(const std::string& what, const std::function<bool()>& done,
                       std::chrono::steady_clock::time_point end, const std::function<std::string()>& awaited,
                       const std::function<void()>& look = {}) const;
  // By rank whose part is missing, who owes it: the rank, or the acting rank of one that is absent.
  std::map<int, int> debtors(const std::function<bool(int rank)>& late) const;
  // "rank 1 (pid 41; the launcher's number)": others that owe something.
  std::string in_words(const std::map<int, int>& owed) const;
  void end_stragglers(const std::map<int, int>& owed) const;

  Group group_;
  std::shared_ptr<WorldState> world_;
  std::shared_ptr<GenerationWatch> watch_;
};

}  // namespace shoal
