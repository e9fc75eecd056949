#include "shoal/fsdp.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <cmath>

#include "engine/changes/outside_inference_mode.h"
#include "engine/changes/separate_memory.h"
#include "engine/gradients/gradient_norm.h"
#include "engine/gradients/local_gradients.h"
#include "engine/hooks/hook_use.h"
#include "engine/sharded/sharded_ranges.h"
#include "engine/wrapper/logging.h"
#include "optim/scaler_options.h"
#include "shoal/error.h"
#include "shoal/group.h"
#include "strategy/fsdp/ignored.h"
#include "strategy/fsdp/place.h"
#include "strategy/fsdp/shards.h"
#include "strategy/fsdp/wrapped_tensors.h"

namespace shoal {
namespace {

std::unique_ptr<DataParallelCore::State> make_state(std::shared_ptr<torch::nn::Module> module, const Group& group,
                                                    const FullyShardedDataParallelOptions& options) {
  options.validate();
  agree(group, "the options of FullyShardedDataParallel", describe(options));
  const auto ignored = module ? ignored_names(*module, options) : std::vector<std::string>();
  if (module) place_module(*module, options.device, ignored);
  auto state =
      wrap(std::move(module), group, "FullyShardedDataParallel", ignored, options.sync_module_states, Deferred::keep);
  require_separate_memory(state->tensors.parameters, state->tensors.buffers, state->name);
  require_constant_in_forward(state->tensors, state->name);
  state->buffers.choose(/*broadcast=*/false);
  state->precision = options.precision;
  return state;
}

}  // namespace

FullyShardedCore::FullyShardedCore(std::shared_ptr<torch::nn::Module> module, const Group& group,
                                   const FullyShardedDataParallelOptions& options)
    : DataParallelCore(make_state(std::move(module), group, options)),
      shards_(std::make_unique<Shards>(Shards{.options = options, .groups = make_shard_groups(group, options)})) {
  auto& hook = shards_->options.communication_hook;
  hook = in_use_by(state().name, *state().module, group, hook);
  if (!shards_->groups.equal && !options.sync_module_states) {
    throw UsageError(
        "FullyShardedDataParallel: sync_module_states is off, and hosts run different numbers of ranks, so that their "
        "values cannot be compared: set it, or start the same number on each host");
  }
  shard_parameters(state(), *shards_);
  state().settings = {{"sharding_strategy", sharding_name(options.sharding_strategy)},
                      {"units", fmt::format("{}", shards_->units.size())},
                      {"shard_size", fmt::format("{}", shards_->groups.shard.size())},
                      {"shard_by_parameter", yes_or_no(options.shard_by_parameter)},
                      {"parameters_once_per_host", yes_or_no(shared())},
                      {"unit_limit", fmt::format("{}", options.unit_limit)},
                      {"prefetch_units", fmt::format("{}", options.prefetch_units)},
                      {"byte_limit", options.byte_limit ? fmt::format("{}", *options.byte_limit) : "none"},
                      {"check_unit_order", yes_or_no(options.check_unit_order)},
                      {"cpu_offload", yes_or_no(options.cpu_offload)},
                      {"precision", in_words(options.precision)},
                      {"param_dtype", name_of(options.param_dtype)},
                      {"reduce_dtype", name_of(options.reduce_dtype)},
                      {"buffer_dtype", name_of(options.buffer_dtype)},
                      {"sync_module_states", yes_or_no(options.sync_module_states)}};
  const auto* wrapped = state().module.get();
  for (const auto* list : {&state().tensors.parameters, &state().tensors.buffers}) {
    for (const auto& entry : *list) register_tensor(entry.tensor, {.by = this, .module = wrapped, .ignored = false});
  }
  for (const auto& tensors : {wrapped->parameters(), wrapped->buffers()}) {
    for (const auto& tensor : tensors) {
      if (!find_registration(tensor)) register_tensor(tensor, {.by = this, .module = wrapped, .ignored = true});
    }
  }
  connect_reducer();
}

void FullyShardedCore::connect_reducer() {
  state().reducer->callbacks.holds_back = [shards = shards_.get()] { return shards->defer_depth > 0; };
  state().reducer->callbacks.before_waiting = [pager = shards_->pager] {
    if (!pager) return;
    pager->end();
    pager->set_limit_ignored(false);
  };
}

FullyShardedCore::~FullyShardedCore() {
  unregister_all(*this);
}

// In evaluation, ranks that share memory need no collective, unless values must be converted: they read the shared
// values.
void FullyShardedCore::adopt_changes(bool training) {
  auto& module = *shards_->module;
  if (training) module.require_kinds();
  const bool converts = shards_->options.param_dtype && (shards_->pager || module.any_other_dtype());
  const bool collective = training ? state().no_sync_depth == 0 : converts;
  if (collective) module.adopt_changes({steps(), -1, "replaced parameters"});
}

// Keeps the parameters' tensor objects, so that references to them stay valid.
void FullyShardedCore::unwrap() {
  if (shards_->hold) {
    throw UsageError("FullyShardedDataParallel: unwrap() within summon_full_params(); end that scope first");
  }
  const OutsideInferenceMode outside;
  const torch::NoGradGuard no_grad;
  shards_->module->adopt_changes({steps(), -1, "replaced parameters"});
  std::vector<at::Tensor> values;
  for (const auto& entry : state().tensors.parameters) {
    if (!shards_->options.param_dtype) {
      values.push_back(entry.tensor.detach().clone());
      continue;
    }
    const auto value = whole(entry.tensor, entry.name);  // includes bits that param_dtype cannot hold
    values.push_back(value.element_size() < 4 ? value.to(at::kFloat) : value);
  }
  shards_->module->end();
  for (size_t i = 0; i < values.size(); ++i) {
    const auto& parameter = state().tensors.parameters[i].tensor;
    parameter.set_data(values[i]);
    at::Tensor(parameter).mutable_grad().reset();
  }
  for (const auto& [buffer, dtype] : shards_->buffer_dtypes) buffer.set_data(buffer.to(dtype));
  unregister_all(*this);
  shards_->groups.all.barrier({steps(), -1, "unwrapped"}).wait();  // no rank reads another one's values any more
}

void FullyShardedCore::begin_forward(bool training) {
  shards_->module->require_going_on();
  if (shards_->hold) {
    throw UsageError("FullyShardedDataParallel: forward within summon_full_params(); end that scope first");
  }
  if (!shards_->pager) return;
  shards_->pager->begin(training ? Pager::Pass::training : Pager::Pass::evaluation);
  shards_->pager->set_limit_ignored(training && shards_->grad_op());
}

void FullyShardedCore::end_forward(bool training) {
  if (!training && shards_->pager) shards_->pager->end();
}

TensorCast FullyShardedCore::input_cast() const {
  const auto& dtype = shards_->options.param_dtype;
  if (!dtype) return {};
  return [to = *dtype](const at::Tensor& tensor) { return tensor.is_floating_point() ? tensor.to(to) : tensor; };
}

NoSync FullyShardedCore::defer_all_reduce(bool defer) {
  if (defer && state().reducer->join_state()) {
    throw UsageError("FullyShardedDataParallel: defer_all_reduce() within a Join is not supported; use no_sync()");
  }
  return NoSync(defer ? &shards_->defer_depth : nullptr);
}

std::string FullyShardedCore::open_scope() const {
  if (shards_->hold) return "full_parameters()";
  return shards_->defer_depth > 0 ? "defer_all_reduce()" : DataParallelCore::open_scope();
}

double FullyShardedCore::clip_grad_norm_(double max_norm, double norm_type) {
  if (norm_type == 0) {
    throw UsageError(
        "FullyShardedDataParallel: clip_grad_norm_ with norm type 0, the number of gradients, of which each rank has "
        "parts; give a positive norm type, or infinity");
  }
  if (shards_->computes_shares) refuse_to_clip_shares();
  auto& module = *shards_->module;
  module.serve_readers();
  if (module.clip_without_scale) return module.clip_without_scale(max_norm, norm_type);
  const torch::NoGradGuard no_grad;
  const auto sums = summed_gradients();
  const double norm = global_norm(sums, norm_type, module.shard(), {steps(), -1, "norm of the gradients"});
  module.clip_sums(sums, norm, max_norm);
  return norm;
}

std::vector<std::vector<std::string>> FullyShardedCore::units() const {
  std::vector<std::vector<std::string>> names;
  for (const auto& unit : shards_->units) {
    auto& list = names.emplace_back();
    for (const auto& entry : unit.parameters) list.push_back(entry.name);
  }
  return names;
}

std::vector<at::Tensor> FullyShardedCore::own_parameters() const {
  std::vector<at::Tensor> list;
  for (const auto& piece : shards_->module->pieces()) list.push_back(piece.main);
  return list;
}

std::vector<at::Tensor> FullyShardedCore::own_elements() const {
  std::vector<at::Tensor> list;
  for (const auto& piece : shards_->module->pieces()) list.push_back(piece.elements);
  return list;
}

std::vector<at::Tensor> FullyShardedCore::own_gradients() const {
  std::vector<at::Tensor> list;
  for (const auto& piece : shards_->module->pieces()) list.push_back(piece.sum);
  return list;
}

std::vector<at::Tensor> FullyShardedCore::summed_gradients() {
  auto& module = *shards_->module;
  module.reducer().settle_failed_backward();
  module.reducer().prepare_sums("FullyShardedDataParallel");
  std::vector<at::Tensor> list;
  for (const auto& piece : module.pieces()) {
    if (module.reducer().sums().has_part(piece.gradient)) list.push_back(piece.sum);
  }
  return list;
}

bool FullyShardedCore::shared() const {
  return !shards_->pager;
}

ShardedOptimizerCore::ParamGroups FullyShardedOptimizerCore::complete(const FullyShardedCore& parallel,
                                                                      ParamGroups groups) {
  if (!groups.empty()) return groups;
  groups.emplace_back(std::vector<at::Tensor>());
  for (const auto& gradient : parallel.shards_->module->reducer().gradients()) {
    groups.front().params().push_back(gradient.parameter);
  }
  return groups;
}

std::unique_ptr<ShardedOptimizerCore::State> FullyShardedOptimizerCore::make_state(
    const FullyShardedCore& parallel, bool element_wise, const FullyShardedOptimizerOptions& options) {
  const auto& shards = *parallel.shards_;
  if (!element_wise && !shards.options.shard_by_parameter) {
    throw UsageError(
        "FullyShardedOptimizer: this optimizer is not element-wise (element_wise), so each rank must own whole "
        "parameters; set shard_by_parameter of the FullyShardedDataParallel");
  }
  if (!(options.clip_grad >= 0) || std::isinf(options.clip_grad)) {
    throw UsageError(
        fmt::format("FullyShardedOptimizer: clip_grad {}: give a norm, or 0 for no clipping", options.clip_grad));
  }
  agree(shards.groups.all, "the options of FullyShardedOptimizer",
        {fmt::format("clip_grad {}", options.clip_grad), describe(options.scaler)});
  auto state = std::make_unique<State>("FullyShardedOptimizer", shards.groups.shard);
  state->everybody = shards.groups.all;
  state->modules = {shards.module};
  state->element_wise = element_wise;
  state->clip_grad = options.clip_grad;
  // Pages are gathered on use. In shared memory torch::save and data_ptr() read, too, and those cannot wait.
  state->wait_at_first_touch = shards.pager != nullptr;
  if (!options.scaler) return state;
  options.scaler->validate();
  for (const auto& gradient : shards.module->reducer().gradients()) {
    if (gradient.parameter.element_size() >= 4 && !parallel.precision().compute) {
      throw UsageError(
          fmt::format("FullyShardedOptimizer: parameter {} is {}, which does not need a scaler; unset scaler",
                      gradient.name, c10::toString(gradient.parameter.scalar_type())));
    }
  }
  state->scaler.emplace(*options.scaler);
  return state;
}

FullyShardedOptimizerCore::FullyShardedOptimizerCore(FullyShardedCore& parallel, ParamGroups groups,
                                                     std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                                                     const OptimizerFactory& make, bool element_wise,
                                                     const FullyShardedOptimizerOptions& options)
    : ShardedOptimizerCore(complete(parallel, std::move(groups)), std::move(defaults), make,
                           make_state(parallel, element_wise, options)) {}

}  // namespace shoal
