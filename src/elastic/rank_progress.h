#pragma once
// Progress of the ranks when a recovery begins, and what follows from it for the step in which a rank has ended.

#include <array>
#include <chrono>
#include <cstdint>
#include <vector>

#include "shoal/group.h"

namespace shoal {

// Whether a rank can finish the step, or the exchange after it, in which a death has cut it off.
enum class Ready {
  no,
  // It has its own gradients, which say nothing of other ranks: it can if another rank has finished the step.
  if_another_has,
  yes,  // It has what comes from all ranks.
};

struct RankProgress {
  int64_t changes = 0;                       // steps and exchanges that the rank has finished
  Ready ready = Ready::no;                   // to finish the next one
  bool newcomer = false;                     // it has come, and has no state of the job yet
  bool proven = true;                        // it has completed a step with others
  int64_t together_calls = 0;                // calls of together() that it has ended
  std::chrono::milliseconds longest_wait{};  // for a late rank
  int64_t passes = 0;                        // EpochPosition::progress()
  int64_t place = 0;                         // EpochPosition::next_place()
  int64_t step_places = 0;                   // places that its step takes; 0: it is in none

  static constexpr size_t fields = 9;
  using Row = std::array<int64_t, fields>;
  Row to_row() const;
  static RankProgress from_row(const Row& row);
};

// By rank. Collective.
std::vector<RankProgress> gather_progress(const Group& group, const RankProgress& own);

// What ranks do with the step, or the exchange, in which they are.
struct RecoveryDecision {
  int64_t least = 0;  // steps and exchanges of the rank that has finished the fewest
  int64_t most = 0;
  bool all_finish = false;  // all are in the same one, and can

  // Whether a rank finishes it; otherwise it undoes what it has begun.
  bool finishes(const RankProgress& rank) const { return all_finish || rank.changes < most; }
  // Whether it cannot be where the others are. in_step: it has a step or an exchange to finish.
  bool loses(const RankProgress& rank, bool in_step) const {
    const bool can_finish = rank.ready != Ready::no && in_step;
    return most - least > 1 || (rank.changes < most && !can_finish);
  }
  // Whether it has then completed a step with others.
  bool proves(const RankProgress& rank) const { return !rank.newcomer && (most > least || all_finish || rank.proven); }
};

// Finishes the step if some rank may have finished it, which then all can. holders: ranks with the job's state, at
// least one. in_step: this rank has a step or an exchange to finish.
RecoveryDecision decide(const std::vector<RankProgress>& holders, bool in_step);

}  // namespace shoal
