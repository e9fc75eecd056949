#include "bindings.h"
#include "comm/group/group_state.h"
#include "shoal/error.h"

namespace shoal::python {
namespace {

// CommError with the attributes `rank`, the failed rank of the group, or -1, and `group_ended`: the group is one of ranks that an
// elastic job had before.
void register_comm_error(py::module_& module, py::handle base) {
  static py::handle type = py::exception<CommError>(module, "CommError", base).release();
  type.attr("rank") = -1;
  type.attr("group_ended") = false;
  py::register_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (const CommError& error) {
      auto raised = type(error.what());
      raised.attr("rank") = error.rank();
      raised.attr("group_ended") = dynamic_cast<const GroupEnded*>(&error) != nullptr;
      PyErr_SetObject(type.ptr(), raised.ptr());
    }
  });
}

}  // namespace
}  // namespace shoal::python

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  namespace py = pybind11;
  module.doc() = "The C++ library, as the package shoal uses it.";
  auto& error = py::register_exception<shoal::Error>(module, "Error", PyExc_RuntimeError);
  py::register_exception<shoal::UsageError>(module, "UsageError", error);
  py::register_exception<shoal::DisagreeError>(module, "DisagreeError", error);
  shoal::python::register_comm_error(module, error);
  py::register_exception<shoal::JobLost>(module, "JobLost", error);
  py::register_exception<shoal::StepAbandoned>(module, "StepAbandoned", error);
  py::register_exception<shoal::CheckpointError>(module, "CheckpointError", error);
  py::register_exception<shoal::InputsExhausted>(module, "InputsExhausted", error);
  shoal::python::bind_backend(module);
  shoal::python::bind_wrappers(module);
}
