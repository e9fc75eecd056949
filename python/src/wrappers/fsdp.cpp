#include "shoal/fsdp.h"

#include "wrappers/bind.h"

namespace shoal::python {
namespace {

// FullyShardedCore with the functions that a wrapper's forward uses.
using FsdpCore = OpenCore<FullyShardedCore>;

const std::map<std::string, ShardingStrategy> strategies{
    {"full_shard", ShardingStrategy::full_shard},
    {"shard_grad_op", ShardingStrategy::shard_grad_op},
    {"no_shard", ShardingStrategy::no_shard},
    {"hybrid_shard", ShardingStrategy::hybrid_shard},
    {"hybrid_shard_grad_op", ShardingStrategy::hybrid_shard_grad_op},
};

// By its name, or PyTorch's own enumeration.
ShardingStrategy strategy_of(const py::object& given) {
  auto text =
      py::str(py::hasattr(given, "name") ? py::object(given.attr("name")) : given).attr("lower")().cast<std::string>();
  if (text == "_hybrid_shard_zero2") text = "hybrid_shard_grad_op";
  const auto found = strategies.find(text);
  if (found != strategies.end()) return found->second;
  std::vector<std::string> names;
  for (const auto& [name, strategy] : strategies) names.push_back(name);
  throw UsageError(
      fmt::format("FullyShardedDataParallel: sharding_strategy {}: choose from {}", text, fmt::join(names, ", ")));
}

FullyShardedDataParallelOptions fsdp_options(const py::dict& given) {
  FullyShardedDataParallelOptions options;
  Keywords(given, "FullyShardedDataParallel")
      .with("sharding_strategy", [&](const py::object& value) { options.sharding_strategy = strategy_of(value); })
      .with("auto_wrap_policy",
            [&](const py::object& names) {
              if (!names.is_none()) options.auto_wrap_policy = wrap_names(names.cast<std::vector<std::string>>());
            })
      .read("shard_size", options.shard_size)
      .read("sync_module_states", options.sync_module_states)
      .read("shard_by_parameter", options.shard_by_parameter)
      .read("param_dtype", options.param_dtype)
      .read("reduce_dtype", options.reduce_dtype)
      .read("buffer_dtype", options.buffer_dtype)
      .read("ignored_modules", options.ignored_modules)
      .read("ignored_parameters", options.ignored_parameters)
      .with("communication_hook", [&](const py::object& hook) { options.communication_hook = hook_of(hook); })
      .read("unit_limit", options.unit_limit)
      .read("prefetch_units", options.prefetch_units)
      .read("byte_limit", options.byte_limit)
      .read("check_unit_order", options.check_unit_order)
      .finish();
  return options;
}

SummonFullParamsOptions summon_options(const py::dict& given) {
  using O = SummonFullParamsOptions;
  return options_from<O>(given, "summon_full_params", "writeback", &O::writeback, "rank0_only", &O::rank0_only,
                         "offload_to_cpu", &O::offload_to_cpu, "with_grads", &O::with_grads, "recurse", &O::recurse);
}

FullyShardedOptimizerOptions fsdp_optimizer_options(const py::dict& given) {
  FullyShardedOptimizerOptions options;
  Keywords(given, "FullyShardedOptimizer")
      .read("clip_grad", options.clip_grad)
      .with("scaler", [&](const py::object& scaler) { options.scaler = scaler_of(scaler); })
      .finish();
  return options;
}

void bind_fsdp_wrapper(py::module_& module) {
  py::class_<FullParameters, Held<FullParameters>>(module, "FullParameters").def("end", [](FullParameters& scope) {
    unlocked([&] { scope.end(); });
  });
  py::class_<FullyShardedCore, DataParallelCore, Held<FullyShardedCore>>(module, "FullyShardedBase");
  py::class_<FsdpCore, FullyShardedCore, Held<FsdpCore>> fsdp(module, "FullyShardedCore");
  fsdp.def(py::init([](const std::shared_ptr<Mirror>& mirror, const Group& group, const py::dict& given) {
        const auto options = fsdp_options(given);
        return unlocked([&] { return Held<FsdpCore>(new FsdpCore(mirror, group, options)); });
      }))
      .def("units", [](const FsdpCore& core) { return core.units(); })
      .def("shared", [](const FsdpCore& core) { return core.shared(); })
      .def(
          "defer_all_reduce", [](FsdpCore& core) { return std::make_unique<Scope>(core.defer_all_reduce()); },
          py::keep_alive<0, 1>())
      .def("clip_grad_norm_",
           [](FsdpCore& core, double max_norm, double norm_type) {
             return unlocked([&] { return core.clip_grad_norm_(max_norm, norm_type); });
           })
      .def("full_state_dict",
           [](const FsdpCore& core, std::optional<int> recipient) {
             return unlocked([&] { return core.full_state_dict(recipient); });
           })
      .def(
          "summon_full_params",
          [](FsdpCore& core, const py::dict& given) {
            const auto options = summon_options(given);
            return unlocked([&] { return Held<FullParameters>(new FullParameters(core.summon_full_params(options))); });
          },
          py::keep_alive<0, 1>())
      .def("unwrap", [](FsdpCore& core) { unlocked([&] { core.unwrap(); }); })
      .def("own_parameters", [](const FsdpCore& core) { return core.own_parameters(); })
      .def("summed_gradients", [](FsdpCore& core) { return unlocked([&] { return core.summed_gradients(); }); });
  bind_parallel<FsdpCore>(fsdp);
}

}  // namespace

void bind_fsdp(py::module_& module) {
  bind_fsdp_wrapper(module);
  using Optimizer = FullyShardedOptimizerCore;
  py::class_<Optimizer, ShardedOptimizerCore, Held<Optimizer>>(module, "FullyShardedOptimizerCore")
      .def(py::init([](FsdpCore& core, const py::list& groups, const py::dict& defaults, const std::string& name,
                       const py::object& make, bool element_wise, const py::dict& given) {
             const auto options = fsdp_optimizer_options(given);
             auto recipe = recipe_of(groups, defaults, name, make,
                                     std::make_shared<StepAgreement>(core.group(), "FullyShardedOptimizer"));
             return unlocked([&] {
               return Held<Optimizer>(new Optimizer(core, std::move(recipe.groups), std::move(recipe.defaults),
                                                    recipe.make, element_wise, options));
             });
           }),
           py::keep_alive<1, 2>());
}

}  // namespace shoal::python
