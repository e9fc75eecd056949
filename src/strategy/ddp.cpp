#include "strategy/ddp.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>

#include "engine/data_parallel_state.h"
#include "engine/hooked_exchange.h"
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
  if (buffer_hook && !broadcast_buffers) {
    faults.emplace_back("buffer_hook takes the place of broadcast_buffers: leave that on, or unset the hook");
  }
  if (!faults.empty()) throw UsageError(fmt::format("DistributedDataParallel: {}", fmt::join(faults, "; ")));
}

namespace {

ReducerOptions reducer_options(const DistributedDataParallelOptions& options) {
  return {.gradient_as_bucket_view = options.gradient_as_bucket_view,
          .find_unused_parameters = options.find_unused_parameters,
          .static_graph = options.static_graph};
}

std::unique_ptr<DataParallelCore::State> make_state(std::shared_ptr<torch::nn::Module> module, const Group& group,
                                                    const DistributedDataParallelOptions& options) {
  options.validate();
  auto state = wrap(std::move(module), group, "DistributedDataParallel", options.ignored, /*sync=*/true);
  state->buffers.choose(options.broadcast_buffers, options.buffer_hook, options.buffer_hook_location);
  state->precision = options.precision;
  auto gradients = gradients_of(state->tensors);
  auto exchange = with_hook(std::make_unique<AllReduce>(group, bucket_caps(options)), options.communication_hook,
                            gradients, "DistributedDataParallel");
  state->make_reducer(std::move(gradients), reducer_options(options), std::move(exchange));
  return state;
}

}  // namespace

DistributedDataParallelCore::DistributedDataParallelCore(std::shared_ptr<torch::nn::Module> module, const Group& group,
                                                         const DistributedDataParallelOptions& options)
    : DataParallelCore(make_state(std::move(module), group, options)) {}

}  // namespace shoal
