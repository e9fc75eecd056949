// Construction of a DistributedOptimizer.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "engine/changes/separate_memory.h"
#include "engine/hooks/hook_use.h"
#include "engine/wrapper/data_parallel_state.h"
#include "engine/wrapper/logging.h"
#include "module/walk.h"
#include "optim/scaler_options.h"
#include "shoal/error.h"
#include "shoal/group.h"
#include "strategy/megatron/chunk.h"
#include "strategy/megatron/chunk_names.h"
#include "strategy/megatron/chunk_turns.h"
#include "strategy/megatron/dtypes.h"
#include "strategy/megatron/reduction.h"
#include "strategy/megatron/scalar_groups.h"

namespace shoal {

using torch::optim::OptimizerParamGroup;

void DistributedOptimizerOptions::validate() const {
  std::vector<std::string> faults;
  if (bucket_size < 1) faults.push_back(fmt::format("bucket_size {}: give at least 1 element", bucket_size));
  if (!(clip_grad >= 0) || std::isinf(clip_grad)) {
    faults.push_back(fmt::format("clip_grad {}: give a norm, or 0 for no clipping", clip_grad));
  }
  if (!faults.empty()) throw UsageError(fmt::format("DistributedOptimizer: {}", fmt::join(faults, "; ")));
  if (scaler) scaler->validate();
}

namespace {

// Without param groups: one of all trainable parameters.
std::vector<OptimizerParamGroup> complete(const Chunks& chunks, std::vector<OptimizerParamGroup> groups,
                                          const DistributedOptimizerOptions& options) {
  const auto ignored = ignored_by_chunk(chunks, options.ignored);
  if (!groups.empty()) return groups;
  std::vector<at::Tensor> parameters;
  for (size_t number = 0; number < chunks.size(); ++number) {
    for (const auto& entry : walk(*chunks[number], ignored[number]).trainable()) parameters.push_back(entry.tensor);
  }
  groups.emplace_back(std::move(parameters));
  return groups;
}

// What stages of one model must have in common.
std::vector<std::string> describe_scalars(const DistributedOptimizerOptions& options) {
  return {fmt::format("clip_grad {}", options.clip_grad),
          fmt::format("log_num_zeros_in_grad {}", options.log_num_zeros_in_grad), describe(options.scaler)};
}

std::vector<std::string> describe(const DistributedOptimizerOptions& options) {
  auto lines = describe_scalars(options);
  lines.push_back(fmt::format("overlap_grad_reduce {}", options.overlap_grad_reduce));
  lines.push_back(fmt::format("overlap_param_gather {}", options.overlap_param_gather));
  lines.push_back(fmt::format("reuse_grad_buf_for_param_gather {}", options.reuse_grad_buf_for_param_gather));
  lines.push_back(fmt::format("shard_within_host {}", options.shard_within_host));
  lines.push_back(fmt::format("grad_reduce_in_fp32 {}", options.grad_reduce_in_fp32));
  lines.push_back(fmt::format("bucket_size {}", options.bucket_size));
  lines.push_back("communication_hook " + in_words(options.communication_hook.get()));
  const auto* timers = options.timers.get();
  const bool meet = timers != nullptr && timers->options().barrier;
  lines.push_back(meet ? fmt::format("timers with barrier, of level {}", timers->options().level)
                       : "no timers with barrier");
  const auto& model = options.model_parallel_group;
  lines.push_back(model ? fmt::format("model_parallel_group of {} ranks", model->size()) : "no model_parallel_group");
  return lines;
}

// The options as this optimizer holds them.
DistributedOptimizerOptions with_hook_in_use(const Chunks& chunks, const Group& group,
                                             DistributedOptimizerOptions options) {
  auto& hook = options.communication_hook;
  hook = in_use_by("DistributedOptimizer", *chunks.front(), group, hook);
  return options;
}

}  // namespace

std::unique_ptr<ShardedOptimizerCore::State> DistributedOptimizerCore::make_state(
    const Modules& chunks, bool element_wise, const Group& group, const DistributedOptimizerOptions& options) {
  options.validate();
  if (options.reuse_grad_buf_for_param_gather && !element_wise) {
    throw UsageError(
        "DistributedOptimizer: reuse_grad_buf_for_param_gather needs an element-wise optimizer (element_wise); "
        "for others, a rank has memory only for the gradients of its own parameters. Unset it");
  }
  const auto ignored = ignored_by_chunk(chunks, options.ignored);
  require_separate(chunks, ignored);
  if (options.shard_within_host && options.model_parallel_group)
    require_own_replica(group, *options.model_parallel_group);
  agree(group, "the options of DistributedOptimizer", describe(options));
  if (options.model_parallel_group) {
    agree(*options.model_parallel_group, "the options of DistributedOptimizer on the ranks of model_parallel_group",
          describe_scalars(options));
  }
  std::vector<ModuleTensors> tensors;
  std::vector<NamedTensor> trainable;
  for (size_t number = 0; number < chunks.size(); ++number) {
    tensors.push_back(wrap(chunks[number], group, "DistributedOptimizer", ignored[number], /*sync=*/true)->tensors);
    require_separate_memory(tensors.back().parameters, tensors.back().buffers, "DistributedOptimizer");
    require_constant_in_forward(tensors.back(), "DistributedOptimizer");
    for (auto entry : tensors.back().trainable()) {
      entry.name = chunk_prefix(chunks, number) + entry.name;
      trainable.push_back(std::move(entry));
    }
  }
  check_dtypes(trainable, options);
  const auto held = with_hook_in_use(chunks, group, options);
  const auto groups = groups_of(group, options);
  auto state = std::make_unique<State>("DistributedOptimizer", groups.shard);
  if (options.shard_within_host) state->everybody = group;
  state->element_wise = element_wise;
  state->clip_grad = options.clip_grad;
  state->log_num_zeros_in_grad = options.log_num_zeros_in_grad;
  state->wait_at_first_touch = options.overlap_param_gather;
  state->timers = options.timers;
  state->scalar_groups = scalar_groups(groups.shard, options.model_parallel_group);
  for (size_t number = 0; number < chunks.size(); ++number) {
    state->modules.push_back(make_chunk(tensors[number], groups, held, element_wise, chunk_prefix(chunks, number)));
    state->modules.back()->know(KnownModule(chunks[number], state->name));
  }
  if (options.scaler) state->scaler.emplace(*options.scaler);
  return state;
}

DistributedOptimizerCore::DistributedOptimizerCore(const Modules& chunks, ParamGroups groups,
                                                   std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                                                   const OptimizerFactory& make, bool element_wise, const Group& group,
                                                   const DistributedOptimizerOptions& options)
    : ShardedOptimizerCore(complete(chunks, std::move(groups), options), std::move(defaults), make,
                           make_state(chunks, element_wise, group, options)),
      reduction_(std::make_unique<Reduction>(Reduction{.modules = chunks,
                                                       .options = with_hook_in_use(chunks, group, options),
                                                       .ignored = ignored_by_chunk(chunks, options.ignored)})) {
  connect_chunks();
}

DistributedOptimizerCore::~DistributedOptimizerCore() = default;

void DistributedOptimizerCore::connect_chunks() {
  const auto& chunks = state().modules;
  for (size_t number = 0; number < chunks.size(); ++number) {
    auto& reducer = chunks[number]->reducer();
    reducer.callbacks.before_backward = [raw = reduction_.get()] {
      if (raw->before_backward) raw->before_backward();
    };
    reducer.callbacks.share = [raw = reduction_.get()] { return raw->share; };
    reducer.callbacks.synchronises = [raw = reduction_.get()] {
      const bool now = raw->options.overlap_grad_reduce && raw->no_sync_depth == 0;
      if (!now) raw->reduced = false;
      return now;
    };
    reducer.callbacks.after_abandoned = [raw = reduction_.get(), &chunks] {
      raw->told_abandoned = true;
      abandon_behind(chunks);
    };
    reducer.callbacks.take_turns = true;  // also with chunks of others: the failing rank alone says when they end
    if (chunks.size() == 1) continue;
    reducer.callbacks.may_leave = [&chunks, number](bool last) {
      if (last) finish_before(chunks, number);
      return is_turn_of(chunks, number);
    };
  }
}

}  // namespace shoal
