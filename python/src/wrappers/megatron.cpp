#include "shoal/megatron.h"

#include "wrappers/bind.h"

namespace shoal::python {
namespace {

DistributedOptimizerOptions megatron_options(const py::dict& given) {
  DistributedOptimizerOptions options;
  Keywords(given, "DistributedOptimizer")
      .read("overlap_grad_reduce", options.overlap_grad_reduce)
      .read("overlap_param_gather", options.overlap_param_gather)
      .read("reuse_grad_buf_for_param_gather", options.reuse_grad_buf_for_param_gather)
      .read("shard_within_host", options.shard_within_host)
      .read("grad_reduce_in_fp32", options.grad_reduce_in_fp32)
      .read("clip_grad", options.clip_grad)
      .read("log_num_zeros_in_grad", options.log_num_zeros_in_grad)
      .with("scaler", [&](const py::object& scaler) { options.scaler = scaler_of(scaler); })
      .read("ignored", options.ignored)
      .with("communication_hook", [&](const py::object& hook) { options.communication_hook = hook_of(hook); })
      .read("bucket_size", options.bucket_size)
      .finish();
  return options;
}

}  // namespace

void bind_megatron(py::module_& module) {
  using Core = DistributedOptimizerCore;
  py::class_<Core, ShardedOptimizerCore, Held<Core>>(module, "DistributedOptimizerCore")
      .def(py::init([](const std::shared_ptr<Mirror>& mirror, const py::list& groups, const py::dict& defaults,
                       const std::string& name, const py::object& make, bool element_wise, const Group& group,
                       const py::dict& given) {
        const auto options = megatron_options(given);
        auto recipe =
            recipe_of(groups, defaults, name, make, std::make_shared<StepAgreement>(group, "DistributedOptimizer"));
        return unlocked([&] {
          return Held<Core>(new Core({mirror}, std::move(recipe.groups), std::move(recipe.defaults), recipe.make,
                                     element_wise, group, options));
        });
      }))
      .def("backward",
           [](Core& core, const at::Tensor& loss, double weight) { unlocked([&] { core.backward(loss, weight); }); })
      .def(
          "no_sync", [](Core& core) { return std::make_unique<Scope>(core.no_sync()); }, py::keep_alive<0, 1>())
      .def("reduce_model_grads", [](Core& core) { unlocked([&] { core.reduce_model_grads(); }); })
      .def("finish_param_sync", [](Core& core) { unlocked([&] { core.finish_param_sync(); }); })
      .def("abandon_step",
           [](Core& core, bool handles_abandoned) {
             unlocked([&] {
               if (!handles_abandoned) return core.abandon_step();
               try {  // as in an except block of it
                 throw StepAbandoned("");
               } catch (const StepAbandoned&) {
                 core.abandon_step();
               }
             });
           })
      .def("main_grad", [](const Core& core, const at::Tensor& parameter) { return core.main_grad(parameter); });
}

}  // namespace shoal::python
