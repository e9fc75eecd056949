#include "bindings.h"
#include "shoal/error.h"

namespace shoal::python {
namespace {

// CommError with the attribute `rank`: the failed rank of the group, or -1.
void register_comm_error(py::module_& module, py::handle base) {
  static py::handle type = py::exception<CommError>(module, "CommError", base).release();
  type.attr("rank") = -1;
  py::register_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (const CommError& error) {
      auto raised = type(error.what());
      raised.attr("rank") = error.rank();
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
  py::register_exception<shoal::StepAbandoned>(module, "StepAbandoned", error);
  py::register_exception<shoal::CheckpointError>(module, "CheckpointError", error);
  py::register_exception<shoal::InputsExhausted>(module, "InputsExhausted", error);
  shoal::python::bind_backend(module);
  shoal::python::bind_wrappers(module);
}
