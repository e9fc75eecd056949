#pragma once
// Log of the operations of a group, for tests and traces.

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "shoal/detail/call.h"
#include "shoal/detail/clock.h"

namespace shoal {

struct CallRecord {
  Op op = Op::barrier;
  ReduceOp reduce = ReduceOp::sum;
  c10::ScalarType dtype = c10::ScalarType::Undefined;  // of the first tensor
  int64_t bytes = 0;                                   // see Call::bytes
  std::string group;
  Label label;
  Clock::time_point issued;    // start of the call on this rank
  Clock::time_point finished;  // return of wait() on this rank; equal to `issued` while the operation is in flight
};

// Thread-safe log in memory. Each rank has its own.
class CallLog {
 public:
  size_t add(const CallRecord& record);
  void finish(size_t index);
  std::vector<CallRecord> records() const;
  // Number of recorded operations of this kind, and their total bytes.
  int64_t count(Op op) const;
  int64_t bytes(Op op) const;
  void clear();

 private:
  mutable std::mutex mutex_;
  std::vector<CallRecord> records_;
  size_t cleared_ = 0;  // records dropped by clear(), so that indices handed out earlier stay valid
};

}  // namespace shoal
