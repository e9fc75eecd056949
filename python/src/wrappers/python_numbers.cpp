#include "wrappers/python_numbers.h"

#include <torch/csrc/Dtype.h>
#include <torch/types.h>

#include <cmath>

namespace shoal::python {

std::string kind_of(const py::handle& number) {
  if (THPVariable_Check(number.ptr())) return py::str(number.attr("dtype")).cast<std::string>();
  if (py::isinstance<py::bool_>(number)) return "bool";
  return py::isinstance<py::int_>(number) ? "int" : "float";
}

std::optional<double> exact_float(const py::handle& number) {
  const auto nearest = PyFloat_AsDouble(number.ptr());
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    return std::nullopt;
  }
  const bool is_integer = PyLong_Check(number.ptr());
  return !is_integer || py::float_(nearest).equal(number) ? std::optional(nearest) : std::nullopt;
}

py::object number_in_python(double number, const std::string& kind) {
  const bool whole = std::isfinite(number) && std::trunc(number) == number;
  if (kind == "bool" && (number == 0 || number == 1)) return py::bool_(number != 0);
  if (kind == "int" && whole) return py::reinterpret_steal<py::object>(PyLong_FromDouble(number));
  if (kind == "float" || kind == "int" || kind == "bool") return py::float_(number);
  at::ScalarType dtype{};
  if (kind.empty()) {
    const bool narrow = std::isnan(number) || static_cast<double>(static_cast<float>(number)) == number;
    dtype = narrow && at::get_default_dtype_as_scalartype() != at::kDouble ? at::kFloat : at::kDouble;
  } else {
    const py::object named = py::module_::import("torch").attr(kind.substr(std::string("torch.").size()).c_str());
    dtype = reinterpret_cast<THPDtype*>(named.ptr())->scalar_type;
    if (!whole && at::isIntegralType(dtype, /*includeBool=*/true)) dtype = at::kDouble;
  }
  return py::cast(at::scalar_tensor(number, dtype));
}

}  // namespace shoal::python
