#include "shoal/local_sgd.h"

#include "wrappers/bind.h"

namespace shoal::python {
namespace {

// LocalUpdates and the Python optimizer that it steps.
struct Local {
  std::shared_ptr<Mirror> mirror;
  std::unique_ptr<PythonOptimizer> optimizer;
  std::unique_ptr<LocalUpdates> updates;
  StepAgreement agreement;
  int64_t every;
};

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
  py::class_<MeanParameters, Held<MeanParameters>>(module, "MeanParameters");
  py::class_<LocalUpdates, Held<LocalUpdates>>(module, "LocalUpdatesCore");
  py::class_<Local, Held<Local>>(module, "LocalUpdates")
      .def(
          py::init([](std::shared_ptr<Mirror> mirror, py::object optimizer, const Group& group, const py::dict& given) {
            const auto options = local_updates_options(given);
            auto inner = PythonOptimizer::over(std::move(optimizer));
            return unlocked([&] {
              auto updates = std::make_unique<LocalUpdates>(mirror, *inner, group, options);
              return Held<Local>(new Local{
                  std::move(mirror), std::move(inner), std::move(updates), {group, "LocalUpdates"}, options.every});
            });
          }))
      .def("step",
           [](Local& local, bool update) {
             local.mirror->refresh();
             local.optimizer->read();
             unlocked([&] {
               local.updates->step(update);
               if (local.updates->steps() % local.every == 0) local.agreement.meet(local.optimizer->param_groups(), "");
             });
           })
      .def("zero_grad", [](Local& local) { unlocked([&] { local.updates->zero_grad(); }); })
      .def(
          "mean_parameters",
          [](Local& local) {
            return unlocked([&] { return Held<MeanParameters>(new MeanParameters(local.updates->mean_parameters())); });
          },
          py::keep_alive<0, 1>())
      .def("steps", [](const Local& local) { return local.updates->steps(); })
      .def("fragments", [](const Local& local) { return local.updates->fragments(); })
      .def_property_readonly(
          "core", [](Local& local) -> LocalUpdates& { return *local.updates; },
          py::return_value_policy::reference_internal)
      .def("read", [](Local& local) { local.optimizer->read(); })
      .def("write", [](Local& local) { local.optimizer->write(); });
}

}  // namespace shoal::python
