#include "wrappers/bind.h"

#include "bindings.h"
#include "engine/changes/changed_values.h"
#include "engine/changes/operator_watch.h"
#include "engine/changes/outside_inference_mode.h"
#include "engine/gradients/gradient_stand_in.h"
#include "shoal/group.h"
#include "wrappers/calls.h"

namespace shoal::python {

Recipe recipe_of(const py::list& groups, const py::dict& defaults, const std::string& name, const py::object& make,
                 std::shared_ptr<StepAgreement> agreement) {
  Recipe recipe{
      .groups = {},
      .defaults = std::make_unique<PythonOptions>(defaults, name),
      .make = [made = share_weakly(make), agreement = std::move(agreement), kinds = std::make_shared<NumberKinds>()](
                  const ParamGroups& share) { return PythonOptimizer::make(share, made, agreement, kinds); }};
  for (const auto& entry : groups) {
    const auto group = entry.cast<py::dict>();
    recipe.groups.emplace_back(group["params"].cast<std::vector<at::Tensor>>(),
                               std::make_unique<PythonOptions>(group, name));
  }
  return recipe;
}

std::optional<GradScalerOptions> scaler_of(const py::object& options) {
  if (options.is_none()) return std::nullopt;
  if (!py::isinstance<py::dict>(options)) throw UsageError("scaler: give a dictionary of options, or None");
  GradScalerOptions scaler;
  Keywords(options.cast<py::dict>(), "scaler")
      .read("initial_scale", scaler.initial_scale)
      .read("dynamic", scaler.dynamic)
      .read("growth_factor", scaler.growth_factor)
      .read("backoff_factor", scaler.backoff_factor)
      .read("growth_interval", scaler.growth_interval)
      .read("hysteresis", scaler.hysteresis)
      .read("min_scale", scaler.min_scale)
      .finish();
  return scaler;
}

py::dict to_dict(const OptimizerState& state) {
  py::dict all;
  for (const auto& [name, named] : state) {
    py::dict entry;
    for (const auto& [key, tensor] : named.tensors) entry[py::str(key)] = tensor;
    for (const auto& [key, number] : named.numbers) entry[py::str(key)] = number;
    all[py::str(name)] = entry;
  }
  return all;
}

OptimizerState from_dict(const py::dict& dict) {
  OptimizerState state;
  for (const auto& [name, entry] : dict) {
    auto& named = state[name.cast<std::string>()];
    for (const auto& [key, value] : entry.cast<py::dict>()) {
      if (THPVariable_Check(value.ptr())) {
        named.tensors[key.cast<std::string>()] = value.cast<at::Tensor>();
      } else {
        const auto exact = exact_float(value);
        if (!exact) {
          throw UsageError(fmt::format("the optimizer state's {} of {} is {}, which is equal to no float",
                                       key.cast<std::string>(), name.cast<std::string>(),
                                       py::str(value).cast<std::string>()));
        }
        named.numbers[key.cast<std::string>()] = *exact;
      }
    }
  }
  return state;
}

void bind_wrappers(py::module_& module) {
  register_python_state();
  let_stand_ins_pass_to(true);
  py::class_<Mirror, std::shared_ptr<Mirror>>(module, "Mirror")
      .def(py::init([](const py::object& of) { return Mirror::of(of); }))
      .def("refresh", &Mirror::refresh)
      .def("names", [](const Mirror& mirror) {
        std::vector<std::pair<std::string, at::Tensor>> names;
        for (const auto& entry : mirror.named_parameters()) names.emplace_back(entry.key(), entry.value());
        return names;
      });
  module.def("agree", [](const Group& group, const std::string& subject, const std::vector<std::string>& items) {
    unlocked([&] { agree(group, subject, items); });
  });
  module.def("agree_as",
             [](const std::string& call, const Group& group, const std::string& subject,
                const std::vector<std::string>& items) { unlocked([&] { agree_as(call, group, subject, items); }); });
  module.def("is_watched", &is_watchable);
  module.def("digest", [](const at::Tensor& tensor) {
    const OutsideInferenceMode outside;
    return unlocked([&] { return digest_of(tensor); });
  });
  module.def("uncompiled", &call_uncompiled);
  py::class_<Scope>(module, "Scope").def("end", &Scope::end);
  bind_hooks(module);
  bind_sharded_optimizer(module);
  bind_ddp(module);
  bind_zero(module);
  bind_fsdp(module);
  bind_megatron(module);
  bind_local_updates(module);
  bind_decentralized(module);
  bind_shard_gossip(module);
  bind_join(module);
  bind_sampler(module);
  bind_elastic(module);
  bind_sync_batch_norm(module);
  bind_checkpoint(module);
}

}  // namespace shoal::python
