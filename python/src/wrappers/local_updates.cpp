#include "wrappers/local_training.h"

#include "wrappers/bind.h"

namespace shoal::python {
namespace {

// {"kind": "SlowMo", "slow_lr": 1.0, ...}
std::variant<Averaging, SlowMo, OuterNesterov> outer_of(const py::dict& given) {
  const auto kind = given["kind"].cast<std::string>();
  if (kind == "Averaging") return Averaging{};
  const auto number = [&](const char* name) { return given[name].cast<double>(); };
  if (kind == "SlowMo") return SlowMo{.slow_lr = number("slow_lr"), .slow_momentum = number("slow_momentum")};
  return OuterNesterov{.lr = number("lr"), .momentum = number("momentum")};
}

LocalUpdatesOptions local_updates_options(const py::dict& given) {
  LocalUpdatesOptions options;
  Keywords(given, "LocalUpdates")
      .read("every", options.every)
      .with("outer", [&](const py::object& outer) { options.outer = outer_of(outer.cast<py::dict>()); })
      .read("fragments", options.fragments)
      .read("delay", options.delay)
      .read("alpha", options.alpha)
      .read("warmup_steps", options.warmup_steps)
      .read("reset_optimizer", options.reset_optimizer)
      .read("average_buffers", options.average_buffers)
      .read("ignored", options.ignored)
      .read("reduce_dtype", options.reduce_dtype)
      .finish();
  return options;
}

}  // namespace

void bind_local_updates(py::module_& module) {
  py::class_<MeanParameters, Held<MeanParameters>>(module, "MeanParameters").def("end", [](MeanParameters& scope) {
    unlocked([&] { scope.end(); });
  });
  py::class_<LocalUpdates, Held<LocalUpdates>>(module, "LocalUpdatesCore");
  py::class_<LocalTraining, Held<LocalTraining>>(module, "LocalUpdates")
      .def(py::init(
          [](std::shared_ptr<Mirror> mirror, const py::object& optimizer, const Group& group, const py::dict& given) {
            const auto options = local_updates_options(given);
            auto inner = PythonOptimizer::over(optimizer);
            return unlocked([&] {
              auto updates = std::make_unique<LocalUpdates>(mirror, *inner, group, options);
              return Held<LocalTraining>(new LocalTraining{
                  std::move(mirror), std::move(inner), std::move(updates), {group, "LocalUpdates"}, options.every});
            });
          }))
      .def("step",
           [](LocalTraining& local, bool update) {
             local.mirror->refresh();
             local.optimizer->read();
             unlocked([&] {
               local.updates->step(update);
               const bool agrees = !local.agreement.before_commit() && local.updates->steps() % local.every == 0;
               if (agrees) local.agreement.meet(local.optimizer->param_groups(), "");
             });
             local.optimizer->write_state();  // which an exchange may have reset
           })
      .def("before_loading", [](LocalTraining& local) { local.updates->before_loading(); })
      .def("parameters_loaded", [](LocalTraining& local) { local.updates->parameters_loaded(); })
      .def("zero_grad",
           [](LocalTraining& local, bool set_to_none) { unlocked([&] { local.updates->zero_grad(set_to_none); }); })
      .def(
          "mean_parameters",
          [](LocalTraining& local) {
            return unlocked([&] { return Held<MeanParameters>(new MeanParameters(local.updates->mean_parameters())); });
          },
          py::keep_alive<0, 1>())
      .def("steps", [](const LocalTraining& local) { return local.updates->steps(); })
      .def("fragments", [](const LocalTraining& local) { return local.updates->fragments(); })
      .def_property_readonly(
          "core", [](LocalTraining& local) -> LocalUpdates& { return *local.updates; },
          py::return_value_policy::reference_internal)
      .def("read", [](LocalTraining& local) { local.optimizer->read(); })
      .def("write", [](LocalTraining& local) { local.optimizer->write(); });
}

}  // namespace shoal::python
