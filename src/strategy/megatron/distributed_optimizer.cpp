#include "shoal/megatron.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "engine/sharded/sharded_ranges.h"
#include "engine/wrapper/data_parallel_state.h"
#include "engine/wrapper/logging.h"
#include "module/sync.h"
#include "shoal/error.h"
#include "strategy/megatron/chunk.h"
#include "strategy/megatron/chunk_turns.h"
#include "strategy/megatron/reduction.h"
#include "strategy/megatron/scalar_groups.h"

namespace shoal {

namespace {

void leave_uncounted(const std::vector<ChunkParameter>& parameters) {
  for (const auto& parameter : parameters) {
    for (auto& piece : parameter.chunk->pieces()) {
      if (piece.gradient == parameter.gradient) piece.counted = false;
    }
  }
}

std::vector<ChunkParameter> find_all(const std::vector<std::shared_ptr<ShardedModule>>& modules,
                                     const std::vector<at::Tensor>& parameters, const char* what) {
  std::vector<ChunkParameter> found;
  for (const auto& parameter : parameters) {
    const auto before = found.size();
    for (const auto& module : modules) {
      if (const auto gradient = gradient_of(*module, parameter)) found.push_back({module.get(), *gradient});
    }
    if (found.size() > before) continue;
    throw UsageError(
        fmt::format("DistributedOptimizer: {} of a tensor that is not one of its trainable parameters", what));
  }
  return found;
}

// Whether the caller is in a catch block of StepAbandoned, or of an error that has ended the step on all ranks.
bool handles_abandoned_step(const ShardedChunks& chunks) {
  const auto handled = std::current_exception();
  if (!handled) return false;
  const auto ended = [&](const auto& chunk) { return chunk->reducer().has_ended_with(handled); };
  if (std::any_of(chunks.begin(), chunks.end(), ended)) return true;
  try {
    std::rethrow_exception(handled);
  } catch (const StepAbandoned&) {
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace

const Group& DistributedOptimizerCore::group() const {
  return state().everybody ? *state().everybody : state().group;
}

void DistributedOptimizerCore::backward(const at::Tensor& loss_sum, double weight) {
  if (state().modules.size() > 1) {
    throw UsageError("DistributedOptimizer: backward with a weight supports one chunk only; weight the loss instead");
  }
  state().modules.front()->reducer().backward(loss_sum, weight);
}

void DistributedOptimizerCore::shadow() {
  auto& chunks = state().modules;
  chunks.front()->reducer().require_absence();
  std::for_each(chunks.rbegin(), chunks.rend(), [](const auto& chunk) { chunk->reducer().reduce_now(); });
}

void DistributedOptimizerCore::check_shadow() const {
  for (const auto& module : reduction_->modules) check_forward_is_local(*module);
}

void DistributedOptimizerCore::settle() {
  const auto& chunks = state().modules;
  const bool broken =
      std::any_of(chunks.begin(), chunks.end(), [](const auto& chunk) { return chunk->reducer().broken(); });
  if (broken) abandon_round(chunks);
}

void DistributedOptimizerCore::set_join_state(const std::optional<JoinState>& join_state) {
  for (const auto& chunk : state().modules) chunk->reducer().set_join_state(join_state);
}

void DistributedOptimizerCore::broadcast_model(int rank) {
  for (size_t number = 0; number < reduction_->modules.size(); ++number) {
    sync_buffers(group(), reduction_->tensors(number).buffers, rank, state().steps);
  }
}

NoSync DistributedOptimizerCore::no_sync(bool accumulate) {
  return NoSync(accumulate ? &reduction_->no_sync_depth : nullptr);
}

std::string DistributedOptimizerCore::open_scope() const {
  if (reduction_->no_sync_depth > 0) return "no_sync()";
  return state().modules.front()->reducer().join_state() ? "a Join" : "";
}

void DistributedOptimizerCore::all_reduce_grads(const std::vector<at::Tensor>& parameters, const Group& group,
                                                const std::string& name) {
  const auto& options = reduction_->options;
  if (options.overlap_grad_reduce) {
    throw UsageError(
        "DistributedOptimizer: all_reduce_grads must run before the reduction; set overlap_grad_reduce = false");
  }
  if (reduction_->before_backward) {
    throw UsageError(
        "DistributedOptimizer: all_reduce_grads() keeps groups of its own, which do not follow when the ranks of an "
        "Elastic change");
  }
  auto found = find_all(state().modules, parameters, "all_reduce_grads");
  const bool scalars = options.clip_grad > 0 || options.scaler || options.log_num_zeros_in_grad;
  const bool covered = cover(state().groups_of_scalars(), group);
  if (scalars && !covered) {
    throw UsageError(
        "DistributedOptimizer: all_reduce_grads: ranks that share gradients must agree on clip_grad, scaler and "
        "log_num_zeros_in_grad, or their parameters diverge; set model_parallel_group to the ranks that hold one "
        "replica of the model");
  }
  reduction_->declared.add(found, group, name);
  if (covered && !counts(state().group, group)) leave_uncounted(found);
}

void DistributedOptimizerCore::count_once(const std::vector<at::Tensor>& parameters, const Group& group) {
  const auto found = find_all(state().modules, parameters, "count_once");
  if (!cover(state().groups_of_scalars(), group)) {
    throw UsageError(
        "DistributedOptimizer: count_once: norms are not computed over this group's ranks; set model_parallel_group to "
        "the ranks that hold one replica of the model");
  }
  if (!counts(state().group, group)) leave_uncounted(found);
}

void DistributedOptimizerCore::reduce_model_grads() {
  if (reduction_->options.overlap_grad_reduce) {
    throw UsageError(
        "DistributedOptimizer: reduce_model_grads: backward has already reduced the gradients; set overlap_grad_reduce "
        "= false");
  }
  auto& common = state();
  if (reduction_->declared.sum_up(common, /*failed=*/false)) {
    abandon_round(state().modules);
    reduction_->told_abandoned = true;
    throw StepAbandoned(
        fmt::format("step {} was abandoned by a rank that shares gradients with this one", common.steps));
  }
  const auto scatter = [&] {
    auto& chunks = common.modules;
    std::for_each(chunks.rbegin(), chunks.rend(), [](const auto& chunk) { reduce_local(chunk->reducer()); });
  };
  common.time("grads-reduce-scatter", 1, scatter, &common.group);
  reduction_->reduced = true;
}

void DistributedOptimizerCore::finish_param_sync() {
  for (auto& chunk : state().modules) chunk->wait_all();
}

void DistributedOptimizerCore::complete_gradients() {
  reduction_->told_abandoned = false;
  // In a node or a hook of another backward, with whose end those of these modules would end.
  if (BackwardTracker::in_backward()) {
    for (const auto& chunk : state().modules) chunk->reducer().end_now();
  }
  if (reduction_->options.overlap_grad_reduce) {
    finish_round(state().modules);
    return;
  }
  if (!reduction_->reduced) reduce_model_grads();  // also without a backward here: other ranks may have had one
  reduction_->reduced = false;
}

// Parameters take their place.
void DistributedOptimizerCore::end_gradients() {
  if (!reduction_->options.reuse_grad_buf_for_param_gather) return;
  for (auto& chunk : state().modules) {
    chunk->reducer().sums().spoil(
        "has given its memory to the updated parameters (reuse_grad_buf_for_param_gather): drop it with zero_grad() "
        "before the next backward or step()");
  }
}

void DistributedOptimizerCore::abandon_step() {
  if (std::exchange(reduction_->told_abandoned, false) && handles_abandoned_step(state().modules)) return;
  if (reduction_->options.overlap_grad_reduce) {
    abandon_round(state().modules);
    return;
  }
  reduction_->declared.sum_up(state(), /*failed=*/true);
  state().time(
      "grads-reduce-scatter", 1, [this] { abandon_round(state().modules); }, &state().group);  // peers may meet there
}

at::Tensor DistributedOptimizerCore::main_grad(const at::Tensor& parameter) const {
  const auto found = find_all(state().modules, {parameter}, "main_grad").front();
  return shoal::main_grad(*found.chunk, found.gradient);
}

std::vector<ParameterRange> DistributedOptimizerCore::param_range_map(std::optional<int> rank) const {
  std::vector<ParameterRange> all;
  for (size_t number = 0; number < state().modules.size(); ++number) {
    for (auto& range : ranges(*state().modules[number], rank.value_or(group().rank()))) {
      range.chunk = number;
      all.push_back(std::move(range));
    }
  }
  return all;
}

LoggingData DistributedOptimizerCore::logging_data() const {
  const auto& modules = reduction_->modules;
  const auto& options = reduction_->options;
  auto data = log_of(state().name, *modules.front(), group(),
                     {{"chunks", fmt::format("{}", modules.size())},
                      {"bucket_size", fmt::format("{}", options.bucket_size)},
                      {"overlap_grad_reduce", yes_or_no(options.overlap_grad_reduce)},
                      {"overlap_param_gather", yes_or_no(options.overlap_param_gather)},
                      {"reuse_grad_buf_for_param_gather", yes_or_no(options.reuse_grad_buf_for_param_gather)},
                      {"shard_within_host", yes_or_no(options.shard_within_host)},
                      {"grad_reduce_in_fp32", yes_or_no(options.grad_reduce_in_fp32)},
                      {"clip_grad", fmt::format("{}", options.clip_grad)},
                      {"scaler", yes_or_no(options.scaler.has_value())},
                      {"ignored", fmt::format("{}", fmt::join(options.ignored, ", "))}});
  for (size_t number = 0; number < modules.size(); ++number) add_model(data, reduction_->tensors(number));
  for (const auto& chunk : state().modules) add_steps(data, chunk->reducer());
  return data;
}

}  // namespace shoal
