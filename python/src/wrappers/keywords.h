#pragma once
// Keyword arguments as the fields of an options struct: each option is named once, for reading and for errors.

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/Dtype.h>

#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "shoal/error.h"
#include "wrappers/gil.h"

namespace shoal::python {

class Keywords {
 public:
  // owner: the class whose arguments they are, for errors.
  Keywords(py::dict given, std::string owner) : given_(std::move(given)), owner_(std::move(owner)) {}

  // Reads the option `name` if it was given. UsageError for a value of another type.
  template <class T>
  Keywords& read(const char* name, T& value) {
    names_.emplace_back(name);
    if (!given_.contains(name)) return *this;
    const py::object object = given_[name];
    if (!convert(object, value)) {
      throw UsageError(fmt::format("{}: {} is {}, a {}; {}", owner_, name, py::repr(object).cast<std::string>(),
                                   Py_TYPE(object.ptr())->tp_name, wanted<T>()));
    }
    return *this;
  }
  // Reads an option by `act`, which gets the object.
  template <class Act>
  Keywords& with(const char* name, const Act& act) {
    names_.emplace_back(name);
    if (given_.contains(name)) act(py::object(given_[name]));
    return *this;
  }
  // UsageError for an option that was not read, with the list of those that were.
  void finish() const {
    for (const auto& [key, value] : given_) {
      const auto name = key.template cast<std::string>();
      if (std::find(names_.begin(), names_.end(), name) != names_.end()) continue;
      throw UsageError(fmt::format("{} has no option {}; it has {}", owner_, name, fmt::join(names_, ", ")));
    }
  }

 private:
  static bool convert(const py::object& object, bool& value) {
    if (!PyBool_Check(object.ptr())) return false;
    value = object.ptr() == Py_True;
    return true;
  }
  static bool convert(const py::object& object, at::ScalarType& value) {
    if (!THPDtype_Check(object.ptr())) return false;
    value = reinterpret_cast<THPDtype*>(object.ptr())->scalar_type;
    return true;
  }
  static bool convert(const py::object& object, double& value) {
    if (PyBool_Check(object.ptr()) || (!PyFloat_Check(object.ptr()) && !PyLong_Check(object.ptr()))) return false;
    value = object.cast<double>();
    return true;
  }
  template <std::integral T>
  static bool convert(const py::object& object, T& value) {
    if (PyBool_Check(object.ptr()) || PyIndex_Check(object.ptr()) == 0) return false;
    try {
      auto* number = PyNumber_Index(object.ptr());
      if (number == nullptr) throw py::error_already_set();
      value = py::reinterpret_steal<py::object>(number).cast<T>();
    } catch (const py::error_already_set&) {  // such as a tensor of a fraction
      return false;
    } catch (const py::cast_error&) {  // out of range
      return false;
    }
    return true;
  }
  static bool convert(const py::object& object, std::vector<std::string>& value) {
    if (PyUnicode_Check(object.ptr())) return false;  // a name is no list of letters
    try {
      value.clear();
      for (const auto& element : object) value.push_back(element.cast<std::string>());
    } catch (const py::error_already_set&) {
      return false;
    } catch (const py::cast_error&) {
      return false;
    }
    return true;
  }
  template <class T>
  static bool convert(const py::object& object, std::optional<T>& value) {
    if (object.is_none()) {
      value.reset();
      return true;
    }
    T given{};
    if (!convert(object, given)) return false;
    value = std::move(given);
    return true;
  }

  template <class T>
  static std::string wanted() {
    if constexpr (std::is_same_v<T, bool>) return "give True or False";
    if constexpr (std::is_same_v<T, at::ScalarType>) return "give a torch.dtype";
    if constexpr (std::is_same_v<T, std::vector<std::string>>) return "give a list of names";
    if constexpr (std::is_integral_v<T>) {
      using Limits = std::numeric_limits<T>;
      return fmt::format("give a whole number from {} to {}", Limits::min(), Limits::max());
    }
    if constexpr (std::is_floating_point_v<T>) return "give a number";
    if constexpr (requires { typename T::value_type; } && !std::is_same_v<T, std::vector<std::string>>) {
      return wanted<typename T::value_type>() + " or None";
    }
    return "";
  }

  py::dict given_;
  std::string owner_;
  std::vector<std::string> names_;
};

template <class Options>
void read_fields(Keywords& /*keywords*/, Options& /*options*/) {}

template <class Options, class Owner, class T, class... Others>
void read_fields(Keywords& keywords, Options& options, const char* name, T Owner::*field, Others... others) {
  keywords.read(name, options.*field);
  read_fields(keywords, options, others...);
}

// Options whose arguments all are fields: options_from<TopKOptions>(given, "TopKHook", "fraction",
// &TopKOptions::fraction).
template <class Options, class... Fields>
Options options_from(const py::dict& given, const char* owner, Fields... fields) {
  Options options;
  Keywords keywords(given, owner);
  read_fields(keywords, options, fields...);
  keywords.finish();
  return options;
}

}  // namespace shoal::python
