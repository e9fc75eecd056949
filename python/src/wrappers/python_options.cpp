#include "wrappers/python_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/serialize.h>

#include <cmath>
#include <functional>
#include <optional>
#include <set>

#include "shoal/error.h"
#include "wrappers/python_numbers.h"

namespace shoal::python {
namespace {

// How an optimizer computes, which results and checkpoints do not depend on.
const std::set<std::string> about_computing{"foreach", "capturable", "differentiable", "fused"};
// Keys of a param group that are no options.
const std::set<std::string> about_parameters{"params", "param_names", "initial_lr"};

// Values that libtorch's optimizers do not have, where they mean what libtorch does.
bool as_in_libtorch(const std::string& name, const c10::IValue& value, const std::string& optimizer) {
  if (name == "maximize") return value.isBool() && !value.toBool();
  if (name == "decoupled_weight_decay") return value.isBool() && value.toBool() == (optimizer == "AdamW");
  return false;
}

// The number in a tensor or a numpy value of one element, such as a learning rate.
std::optional<c10::IValue> number_in(const py::handle& value) {
  const bool numpy = py::str(py::type::of(value).attr("__module__")).cast<std::string>() == "numpy";
  if (!numpy && !THPVariable_Check(value.ptr())) return std::nullopt;
  if (numpy ? py::hasattr(value, "__len__") && !py::hasattr(value, "item") : value.cast<at::Tensor>().numel() != 1) {
    return std::nullopt;
  }
  try {
    const py::object item = value.attr("item")();
    if (PyLong_Check(item.ptr()) && !exact_float(item)) return item.cast<int64_t>();
    return item.cast<double>();
  } catch (const std::exception&) {  // several elements, or no number
    return std::nullopt;
  }
}

c10::IValue integer(const py::handle& value, const std::string& name) {
  if (const auto number = exact_float(value)) return *number;
  int overflow = 0;
  const auto whole = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
  if (overflow == 0) return static_cast<int64_t>(whole);
  throw UsageError(fmt::format("the optimizer's option {} is {}, which has more than 64 bits: give a smaller number",
                               name, py::str(value).cast<std::string>()));
}

c10::IValue plain(const py::handle& value, const std::string& name) {
  if (value.is_none()) return {};
  if (py::isinstance<py::bool_>(value)) return value.cast<bool>();
  if (py::isinstance<py::float_>(value)) return value.cast<double>();
  if (py::isinstance<py::int_>(value)) return integer(value, name);
  if (const auto number = number_in(value)) return *number;
  if (py::isinstance<py::str>(value)) return value.cast<std::string>();
  if (py::isinstance<py::tuple>(value) || py::isinstance<py::list>(value)) {
    std::vector<c10::IValue> elements;
    for (const auto& element : value) elements.push_back(plain(element, name));
    return c10::ivalue::Tuple::create(std::move(elements));
  }
  throw UsageError(
      fmt::format("the optimizer's option {} is a {}; give a number, a boolean, a string, None or a tuple of them",
                  name, Py_TYPE(value.ptr())->tp_name));
}

// Mixes a value into a digest.
void mix(uint64_t& digest, uint64_t value) {
  digest = (digest ^ value) * 0x100000001b3U;
}

void mix(uint64_t& digest, const c10::IValue& value) {
  if (value.isDouble()) return mix(digest, std::hash<double>()(value.toDouble()));
  if (value.isInt()) return mix(digest, static_cast<uint64_t>(value.toInt()));
  if (value.isBool()) return mix(digest, value.toBool() ? 2 : 1);
  if (value.isString()) return mix(digest, std::hash<std::string>()(value.toStringRef()));
  if (value.isTuple()) {
    for (const auto& element : value.toTupleRef().elements()) mix(digest, element);
  }
  mix(digest, 3);
}

std::string in_words(const c10::IValue& value) {
  if (value.isNone()) return "None";
  if (value.isDouble()) return fmt::format("{}", value.toDouble());
  if (value.isInt()) return fmt::format("{}", value.toInt());
  if (value.isBool()) return value.toBool() ? "True" : "False";
  if (value.isString()) return fmt::format("'{}'", value.toStringRef());
  std::vector<std::string> elements;
  for (const auto& element : value.toTupleRef().elements()) elements.push_back(in_words(element));
  return fmt::format("({})", fmt::join(elements, ", "));
}

}  // namespace

// `like`: the value that Python has, whose kind it gets; none: whole numbers are integers, which serve as floats too.
py::object to_python(const c10::IValue& value, const py::handle& like) {
  if (value.isNone()) return py::none();
  if (value.isBool()) return py::bool_(value.toBool());
  if (value.isString()) return py::str(value.toStringRef());
  const bool in_tensor = like && THPVariable_Check(like.ptr());
  if (value.isInt() && in_tensor) return py::cast(at::full_like(like.cast<at::Tensor>(), value.toInt()));
  if (value.isInt()) return py::int_(value.toInt());
  if (value.isDouble()) {
    const auto number = value.toDouble();
    if (in_tensor) return py::cast(at::full_like(like.cast<at::Tensor>(), number));
    const bool may_be_whole = !like || py::isinstance<py::int_>(like);
    if (may_be_whole && std::trunc(number) == number && std::isfinite(number)) {
      return py::reinterpret_steal<py::object>(PyLong_FromDouble(number));
    }
    return py::float_(number);
  }
  const auto& elements = value.toTupleRef().elements();
  py::list list;
  for (size_t i = 0; i < elements.size(); ++i) {
    const bool has = like && py::isinstance<py::sequence>(like) && py::len(like) == elements.size();
    list.append(to_python(elements[i], has ? py::object(like[py::int_(i)]) : py::object()));
  }
  return py::isinstance<py::list>(like) ? py::object(list) : py::object(py::tuple(list));
}

PythonOptions::PythonOptions(const py::dict& group, std::string optimizer) : optimizer_(std::move(optimizer)) {
  for (const auto& [key, value] : group) {
    const auto name = key.cast<std::string>();
    if (about_computing.contains(name) || about_parameters.contains(name)) continue;
    values_[name] = plain(value, name);
  }
}

std::string PythonOptions::type() const {
  const std::set<std::string> in_libtorch{"Adagrad", "Adam", "AdamW", "RMSprop", "SGD"};
  if (in_libtorch.contains(optimizer_)) return fmt::format("torch::optim::{}Options", optimizer_);
  return fmt::format("options of {} in Python", optimizer_);
}

void PythonOptions::write_to(const py::dict& group) const {
  for (const auto& [name, value] : values_) {
    const auto key = py::str(name);
    group[key] = to_python(value, group.contains(key) ? py::object(group[key]) : py::object());
  }
}

void PythonOptions::serialize(torch::serialize::InputArchive& archive) {
  for (const auto& key : archive.keys()) archive.read(key, values_[key]);
}

void PythonOptions::serialize(torch::serialize::OutputArchive& archive) const {
  for (const auto& [name, value] : values_) {
    if (!as_in_libtorch(name, value, optimizer_)) archive.write(name, value);
  }
}

double PythonOptions::get_lr() const {
  const auto found = values_.find("lr");
  if (found == values_.end() || !found->second.isDouble()) throw UsageError("the optimizer has no learning rate lr");
  return found->second.toDouble();
}

void PythonOptions::set_lr(double lr) {
  values_["lr"] = lr;
}

uint64_t PythonOptions::digest() const {
  uint64_t digest = 0xcbf29ce484222325U;
  for (const auto& [name, value] : values_) {
    mix(digest, std::hash<std::string>()(name));
    mix(digest, value);
  }
  return digest;
}

std::vector<std::string> PythonOptions::lines() const {
  std::vector<std::string> lines;
  for (const auto& [name, value] : values_) lines.push_back(fmt::format("{} {}", name, in_words(value)));
  return lines;
}

}  // namespace shoal::python
