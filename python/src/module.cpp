#include "bindings.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "The C++ library, as the package shoal uses it.";
  shoal::python::bind_errors(module);
  shoal::python::bind_backend(module);
  shoal::python::bind_wrappers(module);
}
