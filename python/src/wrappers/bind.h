#pragma once
// Declarations that the bindings of all strategies share.

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "shoal/detail/data_parallel.h"
#include "shoal/detail/sharded_optimizer.h"
#include "shoal/optimizer_state.h"
#include "training/parts.h"
#include "wrappers/gil.h"
#include "wrappers/keywords.h"
#include "wrappers/mirror.h"
#include "wrappers/python_optimizer.h"

namespace shoal::python {

void bind_ddp(py::module_& module);
void bind_zero(py::module_& module);
void bind_fsdp(py::module_& module);
void bind_megatron(py::module_& module);
void bind_local_updates(py::module_& module);
void bind_decentralized(py::module_& module);
void bind_checkpoint(py::module_& module);
void bind_sharded_optimizer(py::module_& module);
void bind_hooks(py::module_& module);
void bind_join(py::module_& module);
void bind_sampler(py::module_& module);
void bind_elastic(py::module_& module);
void bind_shard_gossip(py::module_& module);
void bind_sync_batch_norm(py::module_& module);

// A Python optimizer to be made: its class, and how it is made of param groups.
struct Recipe {
  ParamGroups groups;
  std::unique_ptr<PythonOptions> defaults;
  OptimizerFactory make;
};
// groups: param groups with all options; defaults: of the class `name`; make: takes a list of param groups, and the
// wrapper keeps it; agreement: on each step, or none.
Recipe recipe_of(const py::list& groups, const py::dict& defaults, const std::string& name, const py::object& make,
                 std::shared_ptr<StepAgreement> agreement);

// A communication hook: an object, its text ("bf16", "powersgd:4"), or None.
std::shared_ptr<CommunicationHook> hook_of(const py::object& hook);

// A loss scaler's options by name, or None.
std::optional<GradScalerOptions> scaler_of(const py::object& options);

// Optimizer state by name, as dictionaries: {"fc.weight": {"step": 3.0, "exp_avg": tensor}}.
py::dict to_dict(const OptimizerState& state);
OptimizerState from_dict(const py::dict& dict);

// Scope of no_sync and its like, which ends when Python says so.
class Scope {
 public:
  explicit Scope(NoSync scope) : scope_(std::move(scope)) {}
  void end() { scope_.reset(); }

 private:
  std::optional<NoSync> scope_;
};

template <class Core>
Mirror& mirror_of(const Core& core) {
  return static_cast<Mirror&>(*core.module());
}

// Methods of the wrappers of a module.
template <class Core, class Class>
void bind_parallel(Class& bound) {
  bound
      .def("before_forward",
           [](Core& core) {
             mirror_of(core).refresh();
             unlocked([&] { core.before_forward(); });
           })
      .def("after_forward",
           [](Core& core, const std::vector<at::Tensor>& outputs, bool trains) {
             if (core.module()->is_training() != trains) core.module()->train(trains);
             unlocked([&] { core.after_forward(outputs); });
           })
      .def("forward_failed", [](Core& core) { unlocked([&] { core.forward_failed(); }); })
      .def("backward",
           [](Core& core, const at::Tensor& loss, double weight) { unlocked([&] { core.backward(loss, weight); }); })
      .def("abandon_step", [](Core& core) { unlocked([&] { core.abandon_step(); }); })
      .def(
          "no_sync", [](Core& core) { return std::make_unique<Scope>(core.no_sync()); }, py::keep_alive<0, 1>())
      .def("buckets", [](const Core& core) { return core.buckets(); })
      .def("steps", [](const Core& core) { return core.steps(); });
}

}  // namespace shoal::python
