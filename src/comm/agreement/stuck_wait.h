#pragma once
// Diagnosis of waits that cannot end, from what waiting ranks tell each other through the store.

#include <optional>
#include <string>

#include "comm/agreement/disagreement.h"
#include "comm/agreement/mutual_wait.h"

namespace shoal {

// One thread's wait for a collective. Costs nothing during the first half second, and a few queries to the store per
// second after that. A store that does not answer yields nothing. Functions return a sentence for a DisagreeError, the
// same on all ranks of the group, or nothing if there is no diagnosis (yet).
class StuckWait {
 public:
  // number: of the collective among those of its group; without one only told() yields anything.
  StuckWait(const GroupState& group, const Call& call, std::optional<uint64_t> number);

  // Call at short intervals while the wait lasts. to_the_end: this thread does nothing else until the collective is
  // finished; otherwise it does not say that it waits.
  std::optional<std::string> look(bool to_the_end);
  // Call at short intervals after the transport has failed, possibly because ranks call different things.
  std::optional<std::string> look_after_failure();
  // A sentence that other ranks have found.
  std::optional<std::string> told() const;
  // Publishes `sentence` for all ranks of the group unless there is one already; returns the one they report.
  std::string tell(const std::string& sentence) const;
  // Call when the wait has ended well.
  void finished() const;

 private:
  const GroupState& group_;
  const bool numbered_;
  Disagreement disagreement_;
  MutualWait mutual_;
  bool posted_ = false;
  Clock::time_point next_told_;
  Clock::time_point next_look_;
  Clock::duration interval_;  // time between queries
  Clock::time_point next_after_failure_{};
};

}  // namespace shoal
