#pragma once
// Why a wait will not end: what ranks that wait find out about each other through the store.

#include <optional>
#include <string>

#include "comm/agreement/disagreement.h"
#include "comm/agreement/mutual_wait.h"

namespace shoal {

// One thread's wait for a collective. Costs nothing before half a second has passed; then a few questions to the store
// per second. A store that does not answer has nothing to say. Both give a sentence for a DisagreeError, the same on
// all ranks of the group; none: not, or not yet.
class StuckWait {
 public:
  // number: of the collective among those of its group; without one, of no interest here, only told() answers.
  StuckWait(const GroupState& group, const Call& call, std::optional<uint64_t> number);

  // While it waits, at short intervals.
  std::optional<std::string> look();
  // The transport has failed, perhaps since ranks call different things: the same at once, at short intervals.
  std::optional<std::string> look_after_failure();
  // What others have found.
  std::optional<std::string> told() const;
  // All ranks of the group are to say this, unless something else has been told already: what they say.
  std::string tell(const std::string& sentence) const;
  // It has ended well.
  void finished() const;

 private:
  const GroupState& group_;
  const bool numbered_;
  Disagreement disagreement_;
  MutualWait mutual_;
  bool posted_ = false;
  Clock::time_point next_told_;
  Clock::time_point next_look_;
  Clock::duration interval_;  // between looks
  Clock::time_point next_after_failure_{};
};

}  // namespace shoal
