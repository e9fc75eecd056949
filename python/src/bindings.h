#pragma once
// Functions that add a part of the package to the extension module, one per concern.

#include <torch/csrc/utils/pybind.h>

namespace shoal::python {

namespace py = pybind11;

// Errors, and how they pass through PyTorch's own bindings.
void bind_errors(py::module_& module);
// Groups, worlds and the backend of torch.distributed.
void bind_backend(py::module_& module);
// Wrappers of Python's modules, and optimizers.
void bind_wrappers(py::module_& module);

}  // namespace shoal::python
