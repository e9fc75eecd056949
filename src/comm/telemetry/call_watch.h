#pragma once
// Reporter of one operation to the flight recorder and the timeline.

#include "shoal/call_log.h"

namespace shoal {

struct GroupState;

class CallWatch {
 public:
  CallWatch() = default;  // reports nothing
  // Begins the operation. published: it waits for data that peers publish on their own.
  CallWatch(const GroupState& group, const Call& call, bool published = false);

  void issued(const GroupState& group);
  // Ends a wait that began at `wait_begin`; the second form is for operations that finished without a wait.
  void finished(const GroupState& group, const Call& call, Clock::time_point wait_begin);
  void finished(const GroupState& group, const Call& call);

 private:
  uint64_t ticket_ = 0;  // 0: nothing is recorded
  Clock::time_point begin_{};
};

}  // namespace shoal
