#include "shoal/strategy/megatron/distributed_optimizer.h"

#include <c10/util/ScopeExit.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>

#include "engine/checkpoint/sharded.h"
#include "engine/data_parallel_state.h"
#include "engine/logging.h"
#include "engine/sharded_optimizer_state.h"
#include "module/sync.h"
#include "module/walk.h"
#include "shoal/base/error.h"
#include "strategy/megatron/chunk.h"

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
std::vector<OptimizerParamGroup> complete(const DistributedOptimizerCore::Modules& chunks,
                                          std::vector<OptimizerParamGroup> groups,
                                          const DistributedOptimizerOptions& options) {
  options.validate();
  if (chunks.empty()) throw UsageError("DistributedOptimizer: give at least one module");
  if (!groups.empty()) return groups;
  std::vector<at::Tensor> parameters;
  for (const auto& module : chunks) {
    if (!module) throw UsageError("DistributedOptimizer: a module is empty");
    for (const auto& entry : walk(*module, options.ignored).trainable()) parameters.push_back(entry.tensor);
  }
  groups.emplace_back(std::move(parameters));
  return groups;
}

}  // namespace

struct DistributedOptimizerCore::Reduction {
  struct Extra {
    std::vector<at::Tensor> parameters;
    Group group;
    std::string what;
    std::string timer;
  };
  Modules modules;
  DistributedOptimizerOptions options;
  std::vector<Extra> extra{};
  int no_sync_depth = 0;
  bool reduced = true;  // without overlap: nothing has accumulated since the last reduction
};

std::unique_ptr<ShardedOptimizerCore::State> DistributedOptimizerCore::make_state(
    const Modules& chunks, bool cut, const Group& group, const DistributedOptimizerOptions& options) {
  options.validate();
  if (options.reuse_grad_buf_for_param_gather && !cut) {
    throw UsageError(
        "DistributedOptimizer: reuse_grad_buf_for_param_gather needs an element-wise optimizer (optim/element_wise.h); "
        "with others a rank has memory for the gradients of its own parameters only. Unset it");
  }
  if (chunks.empty()) throw UsageError("DistributedOptimizer: give at least one module");
  auto state = std::make_unique<State>(State{.name = "DistributedOptimizer",
                                             .group = group,
                                             .clip_grad = options.clip_grad,
                                             .log_num_zeros_in_grad = options.log_num_zeros_in_grad,
                                             .wait_at_first_touch = options.overlap_param_gather,
                                             .timers = options.timers});
  for (size_t number = 0; number < chunks.size(); ++number) {
    const auto prefix = chunks.size() > 1 ? fmt::format("chunk{}.", number) : "";
    state->modules.push_back(make_chunk(chunks[number], group, options, cut, prefix));
  }
  if (options.scaler) state->scaler.emplace(*options.scaler);
  return state;
}

DistributedOptimizerCore::DistributedOptimizerCore(const Modules& chunks, ParamGroups groups,
                                                   std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                                                   const Factory& make, bool cut, const Group& group,
                                                   const DistributedOptimizerOptions& options)
    : ShardedOptimizerCore(complete(chunks, std::move(groups), options), std::move(defaults), make,
                           make_state(chunks, cut, group, options)),
      reduction_(std::make_unique<Reduction>(Reduction{.modules = chunks, .options = options})) {
  for (auto& chunk : state().modules) {
    chunk->reducer().synchronises = [raw = reduction_.get()] {
      const bool now = raw->options.overlap_grad_reduce && raw->no_sync_depth == 0;
      if (!now) raw->reduced = false;
      return now;
    };
  }
}

DistributedOptimizerCore::~DistributedOptimizerCore() = default;

void DistributedOptimizerCore::backward(const at::Tensor& loss_sum, double weight) {
  if (state().modules.size() > 1) {
    throw UsageError("DistributedOptimizer: a backward with a weight is for one chunk; weight the loss instead");
  }
  state().modules.front()->reducer().backward(loss_sum, weight);
}

void DistributedOptimizerCore::shadow() {
  auto& chunks = state().modules;
  chunks.front()->reducer().require_absence();
  // Backward meets the last chunk first, and all others before it ends.
  std::for_each(chunks.rbegin(), chunks.rend(), [](const auto& chunk) { chunk->reducer().begin_now(); });
  std::for_each(chunks.rbegin(), chunks.rend(), [](const auto& chunk) { chunk->reducer().end_now(); });
}

void DistributedOptimizerCore::check_shadow() const {
  for (const auto& module : reduction_->modules) check_forward_is_local(*module);
}

void DistributedOptimizerCore::settle() {
  for (const auto& chunk : state().modules) chunk->reducer().settle();
}

void DistributedOptimizerCore::attend(const std::optional<Attendance>& attendance) {
  for (const auto& chunk : state().modules) chunk->reducer().attend(attendance);
}

void DistributedOptimizerCore::adopt_model(int rank) {
  for (const auto& module : reduction_->modules) {
    sync_buffers(group(), walk(*module, reduction_->options.ignored).buffers, rank, state().steps);
  }
}

NoSync DistributedOptimizerCore::no_sync(bool accumulate) {
  return NoSync(accumulate ? &reduction_->no_sync_depth : nullptr);
}

void DistributedOptimizerCore::all_reduce_grads(const std::vector<at::Tensor>& parameters, const Group& group,
                                                const std::string& name) {
  if (reduction_->options.overlap_grad_reduce) {
    throw UsageError(
        "DistributedOptimizer: all_reduce_grads comes before the reduction; set overlap_grad_reduce = false");
  }
  reduction_->extra.push_back({parameters, group, name + " gradients", name + "-grads-all-reduce"});
}

void DistributedOptimizerCore::reduce_model_grads() {
  if (reduction_->options.overlap_grad_reduce) {
    throw UsageError("DistributedOptimizer: backward has reduced the gradients already (overlap_grad_reduce)");
  }
  auto& common = state();
  const torch::NoGradGuard no_grad;
  for (const auto& extra : reduction_->extra) {
    const auto sum_up = [&] {
      for (const auto& parameter : extra.parameters) {
        const auto grad = main_grad(parameter);
        // Channels-last gradients are not contiguous, but dense; ranks agree on the layout.
        extra.group.all_reduce(grad.as_strided({grad.numel()}, {1}), ReduceOp::sum, common.label(extra.what)).wait();
      }
    };
    common.time(extra.timer.c_str(), 1, sum_up, &extra.group);
  }
  const auto scatter = [&] {
    for (auto& chunk : common.modules) {
      auto& reducer = chunk->reducer();
      const auto usual = std::exchange(reducer.synchronises, [] { return true; });
      const auto restore = c10::make_scope_exit([&] { reducer.synchronises = usual; });
      reducer.reduce_now();
    }
  };
  common.time("grads-reduce-scatter", 1, scatter, &common.group);
  reduction_->reduced = true;
}

void DistributedOptimizerCore::complete_gradients() {
  if (!reduction_->options.overlap_grad_reduce && !reduction_->reduced) reduce_model_grads();
}

// Parameters take their place.
void DistributedOptimizerCore::end_gradients() {
  if (!reduction_->options.reuse_grad_buf_for_param_gather) return;
  for (auto& chunk : state().modules) {
    chunk->reducer().spoil_sums(
        "has given its memory to the updated parameters (reuse_grad_buf_for_param_gather): drop it with zero_grad() "
        "before the next backward or step()");
  }
}

void DistributedOptimizerCore::abandon_step() {
  const auto abandon = [this] {
    for (auto& chunk : state().modules) {
      chunk->reducer().expect_backward();
      chunk->reducer().mark_failed();
      chunk->reducer().abandon();
    }
  };
  if (reduction_->options.overlap_grad_reduce) {
    abandon();
  } else {
    state().time("grads-reduce-scatter", 1, abandon, &state().group);  // peers may meet before theirs
  }
}

at::Tensor DistributedOptimizerCore::main_grad(const at::Tensor& parameter) const {
  for (const auto& chunk : state().modules) {
    if (const auto grad = shoal::main_grad(*chunk, parameter)) return *grad;
  }
  throw UsageError("DistributedOptimizer: main_grad of a tensor that is none of its trainable parameters");
}

std::vector<ParameterRange> DistributedOptimizerCore::param_range_map(std::optional<int> rank) const {
  std::vector<ParameterRange> all;
  for (size_t number = 0; number < state().modules.size(); ++number) {
    for (auto& range : ranges(*state().modules[number], rank.value_or(state().group.rank()))) {
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
                      {"grad_reduce_in_fp32", yes_or_no(options.grad_reduce_in_fp32)},
                      {"clip_grad", fmt::format("{}", options.clip_grad)},
                      {"ignored", fmt::format("{}", fmt::join(options.ignored, ", "))}});
  for (const auto& module : modules) add_model(data, walk(*module, options.ignored));
  for (const auto& chunk : state().modules) add_steps(data, chunk->reducer());
  return data;
}

namespace {

class MegatronSource : public ShardedSource {
 public:
  MegatronSource(DistributedOptimizerCore& optimizer, ShardedOptimizerCore::State& state,
                 DistributedOptimizerCore::Modules modules)
      : ShardedSource(optimizer, state), group_(state.group), modules_(std::move(modules)) {}

  std::string strategy() const override { return "megatron"; }
  Group group() override { return group_; }

 private:
  void add_others(CheckpointView& view) override {
    for (size_t number = 0; number < modules_.size(); ++number) {
      add_rest(view, *modules_[number], modules_.size() > 1 ? fmt::format("chunk{}.", number) : "");
    }
  }

  Group group_;
  DistributedOptimizerCore::Modules modules_;
};

}  // namespace

std::shared_ptr<CheckpointSource> checkpoint_source(DistributedOptimizerCore& optimizer) {
  return std::make_shared<MegatronSource>(optimizer, optimizer.state(), optimizer.reduction_->modules);
}

}  // namespace shoal
