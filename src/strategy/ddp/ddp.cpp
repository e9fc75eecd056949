#include "strategy/ddp/ddp.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <set>

#include "engine/hooks/hook_use.h"
#include "engine/reducer/hooked_reduction.h"
#include "engine/wrapper/data_parallel_state.h"
#include "engine/wrapper/logging.h"
#include "shoal/error.h"
#include "shoal/hooks.h"

namespace shoal {

void DistributedDataParallelOptions::validate() const {
  std::vector<std::string> faults;
  const auto positive = [&](const char* name, double value) {
    if (!(value > 0)) faults.push_back(fmt::format("{} is {}: give MiB above 0", name, value));
  };
  positive("bucket_cap_mb", bucket_cap_mb);
  positive("first_bucket_mb", first_bucket_mb);
  if (static_graph && find_unused_parameters) {
    faults.emplace_back("static_graph finds unused parameters in the first step: unset find_unused_parameters");
  }
  if (buffer_hook && !broadcast_buffers) {
    faults.emplace_back(
        "buffer_hook replaces the broadcast of broadcast_buffers: set broadcast_buffers, or unset the hook");
  }
  if (reduce_dtype && *reduce_dtype != at::kHalf && *reduce_dtype != at::kBFloat16) {
    faults.push_back(fmt::format("reduce_dtype is {}: give float16 or bfloat16, or none for the parameters' own",
                                 c10::toString(*reduce_dtype)));
  }
  if (reduce_dtype && grad_reduce_in_fp32) {
    faults.push_back(fmt::format("reduce_dtype {} and grad_reduce_in_fp32 exclude each other: unset one of them",
                                 c10::toString(*reduce_dtype)));
  }
  if (reduce_dtype && communication_hook) {
    faults.emplace_back(
        "communication_hook replaces the reduction: unset reduce_dtype, or use a CompressHook as the hook's carrier");
  }
  if (!faults.empty()) throw UsageError(fmt::format("DistributedDataParallel: {}", fmt::join(faults, "; ")));
}

namespace {

std::shared_ptr<CommunicationHook> hook_of(const DistributedDataParallelOptions& options) {
  if (options.reduce_dtype) return std::make_shared<CompressHook>(*options.reduce_dtype);
  return options.communication_hook;
}

// Those that ranks have in common.
LoggingData::Settings settings_of(const DistributedDataParallelOptions& options) {
  return {{"bucket_cap_mb", fmt::format("{}", options.bucket_cap_mb)},
          {"first_bucket_mb", fmt::format("{}", options.first_bucket_mb)},
          {"grad_reduce_in_fp32", yes_or_no(options.grad_reduce_in_fp32)},
          {"broadcast_buffers", yes_or_no(options.broadcast_buffers)},
          {"find_unused_parameters", yes_or_no(options.find_unused_parameters)},
          {"static_graph", yes_or_no(options.static_graph)},
          {"precision", in_words(options.precision)},
          {"reduce_dtype", options.reduce_dtype ? c10::toString(*options.reduce_dtype) : "none"},
          {"communication_hook", in_words(options.communication_hook.get())},
          {"buffer_hook", in_words(options.buffer_hook.get(), options.buffer_hook_location)}};
}

// With a consumer, one bucket is being reduced while the next one fills.
void make_reducer(DataParallelCore::State& state, const DistributedDataParallelOptions& options,
                  const std::shared_ptr<GradientConsumer>& consumer, const std::vector<NamedTensor>& frozen) {
  auto gradients = gradients_of(state.tensors);
  for (const auto& entry : frozen) gradients.push_back({entry.name, entry.tensor, entry.sparse_gradient});
  if (options.grad_reduce_in_fp32) widen(gradients);
  auto reduction =
      with_hook(std::make_unique<AllReduce>(state.group, bucket_caps(options), /*consumed=*/consumer != nullptr),
                hook_of(options), gradients, "DistributedDataParallel");
  ReducerOptions chosen{.gradient_as_bucket_view = options.gradient_as_bucket_view,
                        .find_unused_parameters = options.find_unused_parameters,
                        .static_graph = options.static_graph,
                        .consumer = consumer};
  if (consumer) {
    chosen.limits.in_flight = 1;
    chosen.name_of_consumer = "OptimizerInBackward";
    chosen.about_sums =
        "which OptimizerInBackward has used for its update already: clip with its option clip_grad, read the norm from "
        "its last_norm(), and call no step() of the optimizer";
  }
  state.make_reducer(std::move(gradients), chosen, std::move(reduction));
}

std::unique_ptr<DataParallelCore::State> make_state(std::shared_ptr<torch::nn::Module> module, const Group& group,
                                                    DistributedDataParallelOptions options) {
  options.validate();
  auto settings = settings_of(options);
  agree_on_settings(group, "DistributedDataParallel", settings);
  settings.emplace_back("gradient_as_bucket_view", yes_or_no(options.gradient_as_bucket_view));
  settings.emplace_back("ignored", fmt::format("{}", fmt::join(options.ignored, ", ")));
  auto state = wrap(std::move(module), group, "DistributedDataParallel", options.ignored, /*sync=*/true,
                    Deferred::materialize, OtherWrappers::allowed);
  require_constant_in_forward(state->tensors, state->name);
  state->adopts_buffers = options.broadcast_buffers;
  state->buffers.choose(options.broadcast_buffers, options.buffer_hook, options.buffer_hook_location);
  state->precision = options.precision;
  state->settings = std::move(settings);
  options.communication_hook = in_use_by(state->name, *state->module, group, options.communication_hook);
  state->remake_reducer = [to = state.get(), options](const auto& consumer, const auto& frozen) {
    make_reducer(*to, options, consumer, frozen);
  };
  state->remake_reducer(nullptr, {});
  return state;
}

}  // namespace

DistributedDataParallelCore::DistributedDataParallelCore(std::shared_ptr<torch::nn::Module> module, const Group& group,
                                                         const DistributedDataParallelOptions& options)
    : DataParallelCore(make_state(std::move(module), group, options)) {}

void DistributedDataParallelCore::check_optimizer(const torch::optim::Optimizer& optimizer,
                                                  const std::string& caller) const {
  std::set<const c10::TensorImpl*> optimized;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) optimized.insert(parameter.unsafeGetTensorImpl());
  }
  std::vector<std::string> faults;
  for (const auto& entry : state().tensors.trainable()) {
    if (optimized.count(entry.tensor.unsafeGetTensorImpl()) > 0) continue;
    faults.push_back(fmt::format(
        "the optimizer does not have parameter {}: give it to the optimizer, freeze it, or name it in `ignored`",
        entry.name));
  }
  for (const auto& entry : state().tensors.parameters) optimized.erase(entry.tensor.unsafeGetTensorImpl());
  if (!optimized.empty()) {
    faults.push_back(
        fmt::format("the optimizer has {} parameter(s) that this wrapper does not train, so they would never be "
                    "updated; remove them",
                    optimized.size()));
  }
  if (!faults.empty()) throw UsageError(fmt::format("{}: {}", caller, fmt::join(faults, "; ")));
}

void DistributedDataParallelCore::use_up_gradients(const std::shared_ptr<GradientConsumer>& consumer) {
  if (steps() > 0) throw UsageError("OptimizerInBackward: construct it before the first step");
  state().remake_reducer(consumer, {});
}

void DistributedDataParallelCore::require_regroupable() const {
  const auto& now = state();
  if (now.consumer) throw UsageError("Elastic: OptimizerInBackward changes parameters before a step can be undone");
  now.require_regroupable();
}

void DistributedDataParallelCore::regroup(const Group& group, int64_t step, bool moved) {
  auto& now = state();
  auto learnt = now.reducer->order().learnt();
  if (learnt) learnt->from = 0;
  // A lone rank had nobody to compare changed parameters with, and those that it goes on with have its values, or it
  // theirs.
  if (moved || now.group.size() == 1) now.watch.note();
  now.group = group;
  now.entered = false;
  now.buffers.forget_evaluation();
  now.left_over.reset();
  now.remake_reducer(nullptr, {});
  if (auto* hook = now.reducer->reduction().hook()) hook->reset();
  now.reducer->count_from(step);
  // In the first step, some ranks may have learnt an order and others not.
  if (step > 0) now.reducer->resume_from(learnt);
}

}  // namespace shoal
