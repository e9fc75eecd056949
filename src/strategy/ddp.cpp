#include "shoal/strategy/ddp.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <cmath>

#include "engine/reducer.h"
#include "module/sync.h"
#include "module/walk.h"
#include "shoal/base/error.h"

namespace shoal {

void DistributedDataParallelOptions::validate() const {
  std::vector<std::string> faults;
  const auto positive = [&](const char* name, double value) {
    if (!(value > 0) || !std::isfinite(value)) faults.push_back(fmt::format("{} is {}: give MiB above 0", name, value));
  };
  positive("bucket_cap_mb", bucket_cap_mb);
  positive("first_bucket_mb", first_bucket_mb);
  if (static_graph && find_unused_parameters) {
    faults.emplace_back("static_graph knows the unused parameters from the first step: unset find_unused_parameters");
  }
  if (!faults.empty()) throw UsageError(fmt::format("DistributedDataParallel: {}", fmt::join(faults, "; ")));
}

struct DistributedDataParallelCore::State {
  std::shared_ptr<torch::nn::Module> module;
  Group group;
  DistributedDataParallelOptions options;
  ModuleTensors tensors;
  int no_sync_depth = 0;
  std::unique_ptr<Reducer> reducer;
};

namespace {

BucketCaps caps(const DistributedDataParallelOptions& options) {
  constexpr double mebibyte = 1 << 20;
  return {.first_bytes = static_cast<int64_t>(options.first_bucket_mb * mebibyte),
          .bytes = static_cast<int64_t>(options.bucket_cap_mb * mebibyte)};
}

ReducerOptions reducer_options(const DistributedDataParallelOptions& options) {
  return {.gradient_as_bucket_view = options.gradient_as_bucket_view,
          .find_unused_parameters = options.find_unused_parameters,
          .static_graph = options.static_graph};
}

}  // namespace

DistributedDataParallelCore::DistributedDataParallelCore(std::shared_ptr<torch::nn::Module> module, const Group& group,
                                                         const DistributedDataParallelOptions& options) {
  options.validate();
  if (!module) throw UsageError("DistributedDataParallel: the module is empty");
  auto tensors = walk(*module, options.ignored);
  state_ = std::make_unique<State>(State{std::move(module), group, options, std::move(tensors), 0, nullptr});
  sync_module(group, state_->tensors);
  std::vector<Gradient> gradients;
  for (const auto& entry : state_->tensors.trainable()) {
    gradients.push_back({entry.name, entry.tensor, entry.sparse_gradient});
  }
  if (gradients.empty()) {
    throw UsageError("DistributedDataParallel: the model has no parameter that requires a gradient; nothing to train");
  }
  state_->reducer = std::make_unique<Reducer>(std::move(gradients), group, reducer_options(options),
                                              std::make_unique<AllReduce>(group, caps(options)));
  state_->reducer->synchronises = [state = state_.get()] { return state->no_sync_depth == 0; };
}

DistributedDataParallelCore::~DistributedDataParallelCore() = default;

void DistributedDataParallelCore::before_forward() {
  auto& state = *state_;
  if (state.no_sync_depth > 0 || !torch::GradMode::is_enabled()) return;
  if (state.reducer->broken()) state.reducer->abandon();
  state.reducer->check_last_step();
  if (state.options.broadcast_buffers) sync_buffers(state.group, state.tensors.buffers, state.reducer->step());
  state.reducer->expect_backward();
}

void DistributedDataParallelCore::after_forward(const std::vector<at::Tensor>& outputs) {
  if (state_->no_sync_depth == 0 && torch::GradMode::is_enabled()) state_->reducer->inspect(outputs);
}

void DistributedDataParallelCore::forward_failed() {
  state_->reducer->mark_failed();
}

void DistributedDataParallelCore::backward(const at::Tensor& loss_sum, double weight) {
  state_->reducer->backward(loss_sum, weight);
}

NoSync DistributedDataParallelCore::no_sync(bool accumulate) {
  return NoSync(accumulate ? &state_->no_sync_depth : nullptr);
}

void DistributedDataParallelCore::reset() {
  state_->reducer->abandon();
}

std::vector<std::vector<std::string>> DistributedDataParallelCore::buckets() const {
  return state_->reducer->bucket_names();
}

int64_t DistributedDataParallelCore::step() const {
  return state_->reducer->step();
}

}  // namespace shoal
