#pragma once
// Steps that a rank has left by an error of its program, and in which the other ranks are still.

#include <cstdint>
#include <optional>
#include <vector>

#include "elastic/elastic_parts.h"

namespace shoal {

// A first function that throws, and a loop that goes on, leave a step in which the other ranks are.
class DroppedSteps {
 public:
  // Since the last complete step.
  int64_t count() const { return count_; }
  // This rank leaves a step by an error. began_at: the wrapper's step when it began.
  void leave(int64_t began_at) { left_at_ = began_at; }
  // The step that it has left is done again.
  void repeat() { left_at_.reset(); }
  // The next step begins: counts the one that it has left, unless that has ended on all ranks.
  void begin_step(const ElasticParts& parts);
  void complete_step() { count_ = 0; }
  // UsageError on all ranks, which names those that have left more steps than others since the last complete one.
  static void require_equal(const std::vector<double>& by_rank);

 private:
  int64_t count_ = 0;
  std::optional<int64_t> left_at_;
};

}  // namespace shoal
