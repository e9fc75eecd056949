#include "shoal/hooks.h"

#include "engine/hooks/hook_use.h"
#include "shoal/training.h"
#include "training/hook_text.h"
#include "wrappers/bind.h"

namespace shoal::python {
namespace {

using Hook = std::shared_ptr<CommunicationHook>;

QuantizeOptions quantize_options(const py::dict& given) {
  using O = QuantizeOptions;
  return options_from<O>(given, "QuantizeHook", "block", &O::block, "error_feedback", &O::error_feedback);
}

TopKOptions topk_options(const py::dict& given) {
  using O = TopKOptions;
  return options_from<O>(given, "TopKHook", "fraction", &O::fraction, "error_feedback", &O::error_feedback);
}

PowerSgdOptions powersgd_options(const py::dict& given) {
  using O = PowerSgdOptions;
  return options_from<O>(given, "PowerSGDHook", "rank", &O::rank, "start_iteration", &O::start_iteration,
                         "min_compression_rate", &O::min_compression_rate, "error_feedback", &O::error_feedback,
                         "warm_start", &O::warm_start, "batched", &O::batched, "seed", &O::seed);
}

Hook carrier_of(const py::object& given) {
  auto carrier = hook_of(given);
  return carrier ? carrier : std::make_shared<SumHook>();
}

}  // namespace

Hook hook_of(const py::object& hook) {
  if (hook.is_none()) return nullptr;
  if (py::isinstance<py::str>(hook)) {
    try {
      return make_hook(hook.cast<std::string>());
    } catch (const StrategyOptionError& error) {  // has the option's name in the C++ program
      throw UsageError("communication_hook" + error.fault());
    }
  }
  if (py::isinstance<CommunicationHook>(hook)) {
    auto given = hook.cast<Hook>();
    if (is_in_use(*given)) PyGC_Collect();  // by a wrapper that is gone: schedules and optimizers refer to each other
    return given;
  }
  throw UsageError(fmt::format(
      "communication_hook is a {}: give a hook of shoal.hooks, such as shoal.hooks.bf16_compress_hook(), or its text: "
      "fp16, bf16, int8, powersgd:RANK[:START] or topk:FRACTION",
      Py_TYPE(hook.ptr())->tp_name));
}

void bind_hooks(py::module_& module) {
  py::class_<CommunicationHook, Hook>(module, "CommunicationHook", "A reduction of gradients; see shoal.hooks.")
      .def_property_readonly("name", &CommunicationHook::name)
      .def("state", &CommunicationHook::state, "What is carried from step to step, by name; of this rank.")
      .def("load_state", &CommunicationHook::load_state, "Restores it. Call it on all ranks before the first step.")
      .def("__repr__", [](const CommunicationHook& hook) { return "<shoal.hooks: " + hook.name() + ">"; })
      .def("__reduce__", [](const CommunicationHook& hook) {
        throw py::type_error("the hook " + hook.name() + " cannot be pickled or copied: save its state()");
      });
  module.def("compress_hook", [](const py::object& dtype) -> Hook {
    if (!THPDtype_Check(dtype.ptr())) throw UsageError("compress_hook: give torch.float16 or torch.bfloat16");
    return std::make_shared<CompressHook>(reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type);
  });
  module.def("quantize_hook",
             [](const py::dict& given) -> Hook { return std::make_shared<QuantizeHook>(quantize_options(given)); });
  module.def("topk_hook",
             [](const py::dict& given) -> Hook { return std::make_shared<TopKHook>(topk_options(given)); });
  module.def("powersgd_hook", [](const py::object& carrier, const py::dict& given) -> Hook {
    return std::make_shared<PowerSgdHook>(powersgd_options(given), carrier_of(carrier));
  });
  module.def("post_local_sgd_hook", [](const Group& local, int64_t start_iteration, const py::object& carrier) -> Hook {
    return std::make_shared<PostLocalSgdHook>(local, start_iteration, carrier_of(carrier));
  });
  py::class_<PeriodicModelAverager>(module, "PeriodicModelAverager")
      .def(py::init<Group, int64_t, int64_t>())
      .def("average", [](PeriodicModelAverager& averager, const std::vector<at::Tensor>& parameters) {
        return unlocked([&] { return averager.average(parameters); });
      });
}

}  // namespace shoal::python
