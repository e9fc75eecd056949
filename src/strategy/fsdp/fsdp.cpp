#include "shoal/strategy/fsdp.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <cmath>

#include "engine/gradient_norm.h"
#include "engine/logging.h"
#include "engine/sharded_optimizer_state.h"
#include "memory/views.h"
#include "shoal/base/error.h"
#include "shoal/comm/agree.h"
#include "strategy/fsdp/divided.h"
#include "strategy/fsdp/place.h"
#include "strategy/fsdp/shards.h"

namespace shoal {
namespace {

bool is_narrow_or_wide(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat || dtype == at::kDouble;
}

std::string sharding_name(ShardingStrategy strategy) {
  switch (strategy) {
    case ShardingStrategy::full_shard:
      return "full_shard";
    case ShardingStrategy::shard_grad_op:
      return "shard_grad_op";
    case ShardingStrategy::no_shard:
      return "no_shard";
    case ShardingStrategy::hybrid_shard:
      return "hybrid_shard";
    default:
      return "hybrid_shard_grad_op";
  }
}

// Names of the parameters and buffers that are left alone.
std::vector<std::string> ignored_names(const torch::nn::Module& module,
                                       const FullyShardedDataParallelOptions& options) {
  auto names = options.ignored_parameters;
  const auto modules = module.named_modules("", /*include_self=*/false);
  for (const auto& name : options.ignored_modules) {
    if (!modules.contains(name)) {
      throw UsageError(
          fmt::format("FullyShardedDataParallel: ignored_modules: the module has no sub-module named '{}'", name));
    }
    for (const auto& entry : modules[name]->named_parameters()) names.push_back(name + "." + entry.key());
    for (const auto& entry : modules[name]->named_buffers()) names.push_back(name + "." + entry.key());
  }
  bool all = true;
  for (const auto& entry : module.named_parameters()) {
    const bool divided = is_divided(entry.value());
    if (divided) names.push_back(entry.key());
    all = all && divided;
  }
  if (all && !module.parameters().empty()) {
    throw UsageError("FullyShardedDataParallel: the module is sharded already; wrap it once");
  }
  return names;
}

std::unique_ptr<DataParallelCore::State> make_state(std::shared_ptr<torch::nn::Module> module, const Group& group,
                                                    const FullyShardedDataParallelOptions& options) {
  options.validate();
  const auto ignored = module ? ignored_names(*module, options) : std::vector<std::string>();
  if (module) place_module(*module, options.device, ignored);
  auto state =
      wrap(std::move(module), group, "FullyShardedDataParallel", ignored, options.sync_module_states, Deferred::keep);
  state->buffers.choose(/*broadcast=*/false);
  state->precision = options.precision;
  return state;
}

}  // namespace

void FullyShardedDataParallelOptions::validate() const {
  std::vector<std::string> faults;
  if (unit_limit < 1) faults.emplace_back("unit_limit 0: give at least 1 unit");
  if (byte_limit && *byte_limit < 1) faults.push_back(fmt::format("byte_limit {}: give at least 1 byte", *byte_limit));
  if (prefetch_units >= unit_limit) {
    faults.push_back(fmt::format("prefetch_units {} leaves no room in unit_limit {} for the unit in use",
                                 prefetch_units, unit_limit));
  }
  if (shard_size && *shard_size < 1) faults.push_back(fmt::format("shard_size {}: give at least 1 rank", *shard_size));
  const bool hybrid = sharding_strategy == ShardingStrategy::hybrid_shard ||
                      sharding_strategy == ShardingStrategy::hybrid_shard_grad_op;
  if (shard_size && !hybrid) faults.emplace_back("shard_size is for the hybrid strategies");
  for (const auto& [name, dtype] : {std::pair("param_dtype", param_dtype), std::pair("reduce_dtype", reduce_dtype),
                                    std::pair("buffer_dtype", buffer_dtype)}) {
    if (!dtype || is_narrow_or_wide(*dtype)) continue;
    faults.push_back(fmt::format("{} {}: give a floating-point dtype of 16 to 64 bits", name, c10::toString(*dtype)));
  }
  if (!faults.empty()) throw UsageError(fmt::format("FullyShardedDataParallel: {}", fmt::join(faults, "; ")));
}

FullyShardedCore::FullyShardedCore(std::shared_ptr<torch::nn::Module> module, const Group& group,
                                   const FullyShardedDataParallelOptions& options)
    : DataParallelCore(make_state(std::move(module), group, options)),
      shards_(std::make_unique<Shards>(Shards{.options = options, .groups = make_shard_groups(group, options)})) {
  divide_parameters(state(), *shards_);
  state().settings = {{"sharding_strategy", sharding_name(options.sharding_strategy)},
                      {"units", fmt::format("{}", shards_->units.size())},
                      {"shard_size", fmt::format("{}", shards_->groups.shard.size())},
                      {"whole_parameters", yes_or_no(options.whole_parameters)},
                      {"parameters_once_per_host", yes_or_no(shared())},
                      {"unit_limit", fmt::format("{}", options.unit_limit)},
                      {"prefetch_units", fmt::format("{}", options.prefetch_units)}};
  for (const auto& entry : state().tensors.parameters) mark_divided(entry.tensor);
  state().reducer->holds_back = [shards = shards_.get()] { return shards->defer_depth > 0; };
  state().reducer->before_waiting = [pager = shards_->pager] {
    if (!pager) return;
    pager->end();
    pager->keep(false);
  };
}

FullyShardedCore::~FullyShardedCore() {
  for (const auto& entry : state().tensors.parameters) unmark_divided(entry.tensor);
}

// Evaluation needs no other rank where parameters share memory: it reads what they hold.
void FullyShardedCore::adopt_changes(bool training) {
  auto& module = *shards_->module;
  if (training) module.require_kinds();
  const bool collective = training ? state().no_sync_depth == 0 : shards_->options.param_dtype && shards_->pager;
  if (collective) module.adopt_changes({step(), -1, "replaced parameters"});
}

void FullyShardedCore::begin_pass(bool training) {
  if (shards_->holds > 0) {
    throw UsageError("FullyShardedDataParallel: forward while summon_full_params holds the parameters; end that first");
  }
  if (!shards_->pager) return;
  shards_->pager->begin(training ? Pager::Pass::training : Pager::Pass::evaluation);
  shards_->pager->keep(training && shards_->grad_op());
}

void FullyShardedCore::end_pass(bool training) {
  if (!training && shards_->pager) shards_->pager->end();
}

at::Tensor FullyShardedCore::input(const at::Tensor& tensor) const {
  const auto& dtype = shards_->options.param_dtype;
  return dtype && tensor.is_floating_point() ? tensor.to(*dtype) : tensor;
}

NoSync FullyShardedCore::defer_all_reduce(bool defer) {
  if (defer && state().reducer->attendance()) {
    throw UsageError("FullyShardedDataParallel: defer_all_reduce in a Join scope; take no_sync there");
  }
  return NoSync(defer ? &shards_->defer_depth : nullptr);
}

double FullyShardedCore::clip_grad_norm(double max_norm, double norm_type) {
  auto& module = *shards_->module;
  if (module.clip_without_scale) return module.clip_without_scale(max_norm, norm_type);
  const torch::NoGradGuard no_grad;
  module.reducer().prepare_sums("FullyShardedDataParallel");
  std::vector<at::Tensor> sums;
  for (const auto& piece : module.pieces()) {
    if (module.reducer().has_sum(piece.gradient)) sums.push_back(piece.sum);
  }
  const double norm = global_norm(sums, norm_type, module.shard(), {step(), -1, "norm of the gradients"});
  clip_to_norm(sums, norm, max_norm);
  return norm;
}

at::Tensor FullyShardedCore::whole(const at::Tensor& parameter, const std::string& name) const {
  const bool copied = parameter.requires_grad() && parameter.element_size() < 4;
  if (!copied) return parameter.detach().clone();
  // What ranks update, in float32: each rank's pieces among zeroes, summed up.
  auto& module = *shards_->module;
  auto sum = at::empty_strided(parameter.sizes(), dense_strides(parameter),
                               parameter.options().dtype(at::kFloat).requires_grad(false))
                 .zero_();
  auto flat = in_memory_order(sum);
  for (const auto& piece : module.state_pieces("")) {
    if (!piece.updated.defined() || !piece.parameter.is_same(parameter)) continue;
    flat.narrow(0, piece.range.begin, piece.range.size()).copy_(in_memory_order(piece.updated));
  }
  module.shard().all_reduce(flat, ReduceOp::sum, {-1, -1, name}).wait();
  return sum;
}

void FullyShardedCore::visit_full_state(std::optional<int> recipient, const StateVisitor& visit) const {
  const torch::NoGradGuard no_grad;
  shards_->module->adopt_changes({step(), -1, "replaced parameters"});
  const auto& tensors = state().tensors;
  const bool here = !recipient || *recipient == shards_->groups.all.rank();
  std::exception_ptr error;
  const auto show = [&](const NamedTensor& entry, const at::Tensor& value) {
    if (!here || error) return;
    try {
      visit(entry.name, value);
      for (const auto& alias : entry.aliases) visit(alias, value);
    } catch (...) {
      error = std::current_exception();
    }
  };
  for (const auto& entry : tensors.parameters) show(entry, whole(entry.tensor, entry.name));
  for (size_t number = 0; number < tensors.buffers.size(); ++number) {
    const auto& buffer = tensors.buffers[number].tensor;
    const auto dtype = shards_->buffer_dtypes.empty() ? buffer.scalar_type() : shards_->buffer_dtypes[number];
    show(tensors.buffers[number], buffer.detach().to(dtype, /*non_blocking=*/false, /*copy=*/true));
  }
  if (error) std::rethrow_exception(error);
}

std::map<std::string, at::Tensor> FullyShardedCore::full_state_dict(std::optional<int> recipient) const {
  std::map<std::string, at::Tensor> named;
  visit_full_state(recipient, [&](const std::string& name, const at::Tensor& value) { named[name] = value; });
  return named;
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

std::vector<at::Tensor> FullyShardedCore::own_gradients() const {
  std::vector<at::Tensor> list;
  for (const auto& piece : shards_->module->pieces()) list.push_back(piece.sum);
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
  if (!element_wise && !shards.options.whole_parameters) {
    throw UsageError(
        "FullyShardedOptimizer: this optimizer is not element-wise (optim/element_wise.h), so that it needs whole "
        "parameters; set FullyShardedDataParallelOptions::whole_parameters");
  }
  if (!(options.clip_grad >= 0) || std::isinf(options.clip_grad)) {
    throw UsageError(
        fmt::format("FullyShardedOptimizer: clip_grad {}: give a norm, or 0 for no clipping", options.clip_grad));
  }
  auto state = std::make_unique<State>(State{.name = "FullyShardedOptimizer",
                                             .group = shards.groups.shard,
                                             .modules = {shards.module},
                                             .clip_grad = options.clip_grad,
                                             .wait_at_first_touch = true});
  if (!options.scaler) return state;
  options.scaler->validate();
  for (const auto& gradient : shards.module->reducer().gradients()) {
    if (gradient.parameter.element_size() >= 4 && !parallel.precision().compute) {
      throw UsageError(fmt::format("FullyShardedOptimizer: parameter {} is {}, which needs no scaler; unset it",
                                   gradient.name, c10::toString(gradient.parameter.scalar_type())));
    }
  }
  state->scaler.emplace(*options.scaler);
  return state;
}

FullyShardedOptimizerCore::FullyShardedOptimizerCore(FullyShardedCore& parallel, ParamGroups groups,
                                                     std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                                                     const Factory& make, bool element_wise,
                                                     const FullyShardedOptimizerOptions& options)
    : ShardedOptimizerCore(complete(parallel, std::move(groups)), std::move(defaults), make,
                           make_state(parallel, element_wise, options)) {}

}  // namespace shoal
