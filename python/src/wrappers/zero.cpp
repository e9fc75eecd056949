#include "shoal/zero.h"

#include "wrappers/bind.h"

namespace shoal::python {
namespace {

OSSOptions oss_options(const py::dict& given) {
  using O = OSSOptions;
  return options_from<O>(given, "OSS", "broadcast_buffer_size", &O::broadcast_buffer_size, "broadcast_fp16",
                         &O::broadcast_fp16);
}

// Parameters under their numbers, since an optimizer knows no names.
class Numbered : public torch::nn::Module {
 public:
  explicit Numbered(const std::vector<at::Tensor>& parameters) {
    for (size_t number = 0; number < parameters.size(); ++number) {
      register_parameter(std::to_string(number), parameters[number], parameters[number].requires_grad());
    }
  }
};

ShardedDataParallelOptions sharded_ddp_options(const py::dict& given) {
  ShardedDataParallelOptions options;
  options.log_sizes = false;
  Keywords(given, "ShardedDataParallel")
      .read("broadcast_buffers", options.broadcast_buffers)
      .read("sync_models_at_startup", options.sync_models_at_startup)
      .read("auto_refresh_trainable", options.auto_refresh_trainable)
      .read("find_unused_parameters", options.find_unused_parameters)
      .read("grad_reduce_in_fp32", options.grad_reduce_in_fp32)
      .read("ignored", options.ignored)
      .with("communication_hook", [&](const py::object& hook) { options.communication_hook = hook_of(hook); })
      .read("log_sizes", options.log_sizes)
      .read("reduce_buffer_size", options.reduce_buffer_size)
      .read("reduce_fp16", options.reduce_fp16)
      .finish();
  return options;
}

}  // namespace

void bind_zero(py::module_& module) {
  py::class_<OSSCore, ShardedOptimizerBase, Held<OSSCore>>(module, "OSSCore")
      .def(py::init([](const py::list& groups, const py::dict& defaults, const std::string& name,
                       const py::object& make, const Group& group, const py::dict& given) {
        const auto options = oss_options(given);
        auto recipe = recipe_of(groups, defaults, name, make, std::make_shared<StepAgreement>(group, "OSS"));
        return unlocked([&] {
          return Held<OSSCore>(new OSSCore(recipe.groups, std::move(recipe.defaults), std::move(recipe.make),
                                           /*element_wise=*/false, group, options));
        });
      }))
      .def("clip_grad_norm",
           [](OSSCore& optimizer, double max_norm, double norm_type) {
             return unlocked([&] { return optimizer.clip_grad_norm(max_norm, norm_type); });
           })
      .def("add_param_group",
           [](OSSCore& optimizer, const py::dict& group, const std::string& name) {
             const torch::optim::OptimizerParamGroup added(group["params"].cast<std::vector<at::Tensor>>(),
                                                           std::make_unique<PythonOptions>(group, name));
             unlocked([&] { optimizer.add_param_group(added); });
           })
      .def("refresh_trainable", [](OSSCore& optimizer) { unlocked([&] { optimizer.refresh_trainable(); }); })
      .def("own_gradients",
           [](const OSSCore& optimizer) {
             std::vector<at::Tensor> gradients;
             for (const auto& parameter : optimizer.local_params()) {
               if (parameter.grad().defined()) gradients.push_back(parameter.grad());
             }
             return gradients;
           })
      .def("state_dict",
           [](const OSSCore& optimizer, const std::vector<at::Tensor>& parameters, std::optional<int> recipient) {
             return to_dict(unlocked([&] { return optimizer.state_dict(Numbered(parameters), recipient); }));
           })
      .def("load_state_dict", [](OSSCore& optimizer, const std::vector<at::Tensor>& parameters, const py::dict& state) {
        const auto named = from_dict(state);
        unlocked([&] { optimizer.load_state_dict(Numbered(parameters), named); });
      });

  using Core = OpenCore<ShardedDataParallelCore>;
  py::class_<Core, DataParallelCore, Held<Core>> parallel(module, "ShardedDataParallelCore");
  parallel
      .def(py::init([](const std::shared_ptr<Mirror>& mirror, const std::vector<OSSCore*>& optimizers,
                       const Group& group, const py::dict& given) {
             const auto options = sharded_ddp_options(given);
             return unlocked([&] { return Held<Core>(new Core(mirror, optimizers, group, options)); });
           }),
           py::keep_alive<1, 3>())  // the collector drops objects in any order
      .def("refresh_trainable", [](Core& core) { unlocked([&] { core.refresh_trainable(); }); })
      .def("reduce", [](Core& core) { unlocked([&] { core.reduce(); }); });
  bind_parallel<Core>(parallel);
}

}  // namespace shoal::python
