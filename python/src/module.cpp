#include "bindings.h"
#include "shoal/error.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  namespace py = pybind11;
  module.doc() = "The C++ library, as the package shoal uses it.";
  auto& error = py::register_exception<shoal::Error>(module, "Error", PyExc_RuntimeError);
  py::register_exception<shoal::UsageError>(module, "UsageError", error);
  py::register_exception<shoal::DisagreeError>(module, "DisagreeError", error);
  py::register_exception<shoal::CommError>(module, "CommError", error);
  py::register_exception<shoal::StepAbandoned>(module, "StepAbandoned", error);
  py::register_exception<shoal::CheckpointError>(module, "CheckpointError", error);
  py::register_exception<shoal::InputsExhausted>(module, "InputsExhausted", error);
  shoal::python::bind_backend(module);
  shoal::python::bind_wrappers(module);
}
