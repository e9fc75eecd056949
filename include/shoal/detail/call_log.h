#pragma once
// A record of the operations that a group has issued; tests assert on it, traces are written from it.

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "shoal/detail/call.h"

namespace shoal {

using Clock = std::chrono::steady_clock;

struct CallRecord {
  Op op = Op::barrier;
  ReduceOp reduce = ReduceOp::sum;
  c10::ScalarType dtype = c10::ScalarType::Undefined;  // of the first tensor
  int64_t bytes = 0;                                   // see Call::bytes
  std::string group;
  Label label;
  Clock::time_point issued;    // when this rank called
  Clock::time_point finished;  // when this rank had waited for it; equal to issued while in flight
};

// Thread-safe. In-process: every rank has its own.
class CallLog {
 public:
  size_t add(const CallRecord& record);
  void finish(size_t index);
  std::vector<CallRecord> records() const;
  // Number and sum of bytes of the recorded operations of one kind.
  int64_t count(Op op) const;
  int64_t bytes(Op op) const;
  void clear();

 private:
  mutable std::mutex mutex_;
  std::vector<CallRecord> records_;
  size_t cleared_ = 0;  // records dropped by clear(), so that indices handed out earlier stay valid
};

}  // namespace shoal
