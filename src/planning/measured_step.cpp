#include "planning/measured_step.h"

#include <algorithm>
#include <chrono>
#include <unordered_set>

#include "optim/state.h"
#include "shoal/telemetry.h"

namespace shoal {
namespace {

// Parameters that the optimizer updates in a wider dtype than the module's.
std::vector<at::Tensor> main_copies(const torch::optim::Optimizer& optimizer, const torch::nn::Module& module) {
  const auto dtype = module.parameters().front().scalar_type();
  std::vector<at::Tensor> list;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      if (parameter.scalar_type() != dtype) list.push_back(parameter);
    }
  }
  return list;
}

}  // namespace

void MeasuredStep::add(const GroupStatistics& communication) {
  wait_ms += 1e3 * communication.waited_s;
  calls += communication.calls;
  bytes += communication.bytes;
}

MeasuredStep measured_step(TrainingCore& training, int64_t number, int accumulate,
                           const std::function<at::Tensor(int micro)>& loss, bool gradients) {
  const TimedScope whole(timeline_of(training.group()), "step", number);
  auto step = measured_gradients(training, number, accumulate, loss);
  measured_update(training, number, gradients, step);
  return step;
}

MeasuredStep measured_gradients(TrainingCore& training, int64_t number, int accumulate,
                                const std::function<at::Tensor(int micro)>& loss) {
  const auto before = training.statistics();
  auto* timeline = timeline_of(training.group());
  MeasuredStep step;
  for (int micro = 0; micro < accumulate; ++micro) {
    const auto value = loss(micro);
    const TimedScope scope(timeline, "backward", number);
    const auto accumulating = training.no_sync(micro + 1 < accumulate);
    training.backward(accumulate > 1 ? value / accumulate : value);
    step.loss += value.item<double>() / accumulate;
  }
  step.add(training.statistics() - before);
  return step;
}

void measured_update(TrainingCore& training, int64_t number, bool gradients, MeasuredStep& step) {
  const auto before = training.statistics();
  const TimedScope scope(timeline_of(training.group()), "optimizer", number);
  const auto start = Clock::now();
  training.step();
  if (gradients) step.grads_mib = mebibytes(training.gradients());
  training.zero_grad();
  const std::chrono::duration<double> duration = Clock::now() - start;
  auto communication = training.statistics() - before;
  communication.waited_s = std::min(communication.waited_s, duration.count());  // several threads may have waited
  step.add(communication);
  step.update_ms = 1e3 * (duration.count() - communication.waited_s);
}

double mebibytes(const std::vector<at::Tensor>& tensors) {
  double bytes = 0;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& tensor : tensors) {
    if (seen.insert(tensor.unsafeGetTensorImpl()).second) bytes += static_cast<double>(tensor.nbytes());
  }
  return bytes / (1 << 20);
}

double state_mib(const TrainingCore& training, const torch::nn::Module& module) {
  double sum = 0;
  for (const auto* local : training.local_optimizers()) {
    sum += mebibytes(state_tensors(*local)) + mebibytes(main_copies(*local, module));
  }
  return sum;
}

}  // namespace shoal
