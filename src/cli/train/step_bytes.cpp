#include "cli/train/step_bytes.h"

#include <algorithm>
#include <utility>

#include "planning/bytes_over_tcp.h"

namespace shoal::cli {

void StepBytes::begin() {
  before_ = bytes_over_tcp();
}

void StepBytes::count() {
  const auto now = bytes_over_tcp();
  sum_ += std::max<int64_t>(0, now - std::exchange(before_, now));
}

void StepBytes::between(const Group& present, const std::function<void()>& work) {
  const Label label{-1, -1, "between steps"};
  count();
  present.barrier(label).wait();
  work();
  begin();
  present.barrier(label).wait();
}

}  // namespace shoal::cli
