#include "cli/train/train_result.h"

namespace shoal::cli {

void TrainResult::add(const TrainedStep& step) {
  const auto& measured = step.measured;
  if (wait_ms.empty()) grads_mib = measured.grads_mib;  // measured in the first step alone
  wait_ms.push_back(measured.wait_ms);
  update_ms.push_back(measured.update_ms);
  sent.push_back(measured.bytes);
  calls += measured.calls;
  samples += step.samples;
  all_samples += step.all_samples;
}

}  // namespace shoal::cli
