#pragma once
// Tells the flight recorder and the timeline of one operation.

#include "shoal/detail/call_log.h"

namespace shoal {

struct GroupState;

class CallWatch {
 public:
  CallWatch() = default;  // nobody looks
  // The operation begins. `published`: it is a wait for something that peers publish on their own.
  CallWatch(const GroupState& group, const Call& call, bool published = false);

  void issued(const GroupState& group);
  // At the end of a wait that began at `wait_begin`; the second form: it was seen without a wait.
  void finished(const GroupState& group, const Call& call, Clock::time_point wait_begin);
  void finished(const GroupState& group, const Call& call);

 private:
  uint64_t ticket_ = 0;  // 0: no record
  Clock::time_point begin_{};
};

}  // namespace shoal
