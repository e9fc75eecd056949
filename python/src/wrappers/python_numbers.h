#pragma once
// Numbers of Python, in options and states of its optimizers, as the floats that C++ keeps of them. Call all with the
// lock.

#include <map>
#include <optional>
#include <string>

#include "wrappers/gil.h"

namespace shoal::python {

// What numbers of an optimizer's state are in Python, by name: "int", "float", "bool", or a tensor of a dtype,
// "torch.float64". Shared by the optimizers of all shares. Use it with the lock.
using NumberKinds = std::map<std::string, std::string>;

// The kind of a number, or of a tensor with one.
std::string kind_of(const py::handle& number);

// The float that is equal to a number; nothing for an integer that no float equals.
std::optional<double> exact_float(const py::handle& number);

// The number as one of this kind, or, where the kind does not have it, as a float. Of an unknown kind, "", it is what
// PyTorch's optimizers make of it: a tensor of the default dtype.
py::object number_in_python(double number, const std::string& kind);

}  // namespace shoal::python
