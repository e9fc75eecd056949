#pragma once
// Bytes that this rank receives over TCP in the steps, without those of the work between them.

#include <cstdint>
#include <functional>

#include "shoal/group.h"

namespace shoal::cli {

class StepBytes {
 public:
  // Steps begin: what came until now belongs to none.
  void begin();
  // Counts what has come since.
  void count();
  // Runs what all ranks do between two steps. No rank sends what belongs to it, or to the step after it, before all
  // have counted what came until then.
  void between(const Group& present, const std::function<void()>& work);
  int64_t counted() const { return sum_; }

 private:
  int64_t sum_ = 0;
  int64_t before_ = 0;  // bytes over TCP when steps began, or were counted
};

}  // namespace shoal::cli
