#include "wrappers/mirror.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "shoal/error.h"

namespace shoal::python {
namespace {

constexpr const char* advice = "construct the wrapper after changing the module";

// Other modules have a `sparse` of their own, such as those of graphs.
bool is_embedding(const py::object& module) {
  const auto nn = py::module_::import("torch.nn");
  return py::isinstance(module, nn.attr("Embedding")) || py::isinstance(module, nn.attr("EmbeddingBag"));
}

// Forwards look tables up by it.
SharedObject interned(const char* name) {
  return share(py::reinterpret_steal<py::object>(PyUnicode_InternFromString(name)));
}

at::Tensor checked(const py::handle& value, const std::string& name) {
  if (!THPVariable_Check(value.ptr())) {
    throw UsageError(fmt::format("{} is a {}, not a tensor", name, Py_TYPE(value.ptr())->tp_name));
  }
  const auto uninitialized = py::module_::import("torch.nn.parameter").attr("UninitializedTensorMixin");
  if (py::isinstance(value, uninitialized)) {
    throw UsageError(fmt::format("{} has no shape yet: run the lazy module once before wrapping it", name));
  }
  auto tensor = value.cast<at::Tensor>();
  if (tensor.key_set().has(c10::DispatchKey::Python)) {
    throw UsageError(fmt::format("{} is a {}, whose operators Python implements; shoal trains plain tensors", name,
                                 Py_TYPE(value.ptr())->tp_name));
  }
  return tensor;
}

}  // namespace

struct Mirror::Walk {
  std::map<PyObject*, std::shared_ptr<Mirror>> seen{};
  std::vector<Table> tables{};
  std::set<std::string> transient{};
};

void Mirror::add(const py::object& module, const std::string& name, const std::shared_ptr<Mirror>& made, Walk& walk) {
  const auto table = [&](const char* attribute, const char* kind) -> py::dict {
    auto dict = module.attr(attribute);
    if (!py::isinstance<py::dict>(dict)) {
      throw UsageError(
          fmt::format("{} is a {}, which has no Python parameters of its own: wrap the module it was made from",
                      name.empty() ? "the module" : name, Py_TYPE(module.ptr())->tp_name));
    }
    walk.tables.push_back({share_weakly(module), interned(attribute), kind, name.empty() ? "" : name + "."});
    return dict.cast<py::dict>();
  };
  if (is_embedding(module) && py::bool_(module.attr("sparse"))) {
    throw UsageError(
        fmt::format("{} has sparse gradients, which shoal does not reduce from Python: make it with "
                    "sparse=False",
                    name.empty() ? "the module" : name));
  }
  const auto slots = [&](py::dict dict, auto&& act) {
    const auto here = walk.tables.size() - 1;
    for (const auto& [key, value] : dict) {
      const auto object = py::reinterpret_borrow<py::object>(value);
      Slot slot{.key = share(py::reinterpret_borrow<py::object>(key))};
      if (!value.is_none()) slot.tensor = slot.seen = act(py::cast<std::string>(key), object);
      if (!value.is_none() && !slot.tensor.defined()) slot.child = share_weakly(object);
      walk.tables[here].slots.push_back(std::move(slot));
    }
  };
  const auto full = [&](const std::string& key) { return name.empty() ? key : name + "." + key; };
  slots(table("_parameters", "parameter"), [&](const std::string& key, const py::object& value) {
    auto tensor = checked(value, full(key));
    made->register_parameter(key, tensor, tensor.requires_grad());
    return tensor;
  });
  auto buffers = table("_buffers", "buffer");
  for (const auto& key : module.attr("_non_persistent_buffers_set")) {
    walk.transient.insert(full(py::cast<std::string>(key)));
  }
  slots(std::move(buffers), [&](const std::string& key, const py::object& value) {
    return made->register_buffer(key, checked(value, full(key)));
  });
  slots(table("_modules", "module"), [&](const std::string& key, const py::object& value) {
    auto& child = walk.seen[value.ptr()];
    if (!child) {
      child = std::shared_ptr<Mirror>(new Mirror(Py_TYPE(value.ptr())->tp_name));
      add(value, full(key), child, walk);
    }
    made->register_module(key, child);
    return at::Tensor();
  });
}

std::shared_ptr<Mirror> Mirror::of(const py::object& module) {
  Walk walk;
  auto made = std::shared_ptr<Mirror>(new Mirror(Py_TYPE(module.ptr())->tp_name));
  walk.seen[module.ptr()] = made;
  add(module, "", made, walk);
  made->tables_ = std::move(walk.tables);
  made->transient_ = std::move(walk.transient);
  return made;
}

// Caches, such as masks, that a module keeps out of its state and makes when it needs them.
bool Mirror::Table::leaves_alone(const py::object& owner_now, const py::handle& key) const {
  return is_buffers() && PySet_Contains(owner_now.attr("_non_persistent_buffers_set").ptr(), key.ptr()) == 1;
}

bool Mirror::Slot::holds(const py::handle& value) const {
  if (value.ptr() == nullptr) return false;
  if (child) {
    const auto known = object_in(child);  // none: it has gone, so it is no child any more
    return !known.is_none() && known.is(value);
  }
  if (!seen.defined()) return value.is_none();
  return THPVariable_Check(value.ptr()) && THPVariable_Unpack(value.ptr()).is_same(seen);
}

void Mirror::refresh_table(Table& table) {
  const auto module = object_in(table.module);
  if (module.is_none()) return;  // nobody can change it any more
  const py::object dict = module.attr(*table.attribute);
  const bool buffer = table.is_buffers();
  const auto refuse = [&](const py::handle& key, const char* what, const char* instead = advice) {
    throw UsageError(
        fmt::format("the {} {}{} was {}; {}", table.kind, table.owner, key.cast<std::string>(), what, instead));
  };
  for (auto& slot : table.slots) {
    auto* now = PyDict_GetItemWithError(dict.ptr(), slot.key->ptr());
    if (slot.holds(now)) continue;
    if (table.leaves_alone(module, *slot.key) && !slot.tensor.defined()) continue;
    if (now == nullptr) refuse(*slot.key, "removed");
    if (buffer && !slot.tensor.defined()) {
      refuse(*slot.key, "None when the module was wrapped, so that no rank synchronises or saves it");
    }
    if (now == Py_None) refuse(*slot.key, "set to None");
    if (!buffer) {
      refuse(*slot.key,
             "replaced by another object (for torch.func.functional_call(), give it the module, model.module)");
    }
    slot.seen = checked(now, table.owner + slot.key->cast<std::string>());
    slot.tensor.set_data(slot.seen.detach());
  }
  if (PyDict_Size(dict.ptr()) == static_cast<Py_ssize_t>(table.slots.size())) return;
  for (const auto& [key, value] : dict.cast<py::dict>()) {
    const auto known = [&key = key](const Slot& slot) { return slot.key->equal(key); };
    if (table.leaves_alone(module, key) || std::any_of(table.slots.begin(), table.slots.end(), known)) continue;
    refuse(key, "added", buffer ? "register it in __init__, or in forward with persistent=False" : advice);
  }
}

void Mirror::refresh() {
  for (auto& table : tables_) refresh_table(table);
}

std::function<void()> Mirror::take_shapes(const Shapes& shapes) const {
  const py::gil_scoped_acquire lock;
  const auto resize = py::module_::import("shoal._resized").attr("resize");
  std::vector<SharedObject> undo;
  for (const auto& table : tables_) {
    py::dict other;
    for (const auto& slot : table.slots) {
      const auto found = table.is_buffers() ? shapes.find(table.owner + slot.key->cast<std::string>()) : shapes.end();
      if (found == shapes.end() || !slot.tensor.defined()) continue;
      if (slot.tensor.sizes() != at::IntArrayRef(found->second)) other[*slot.key] = found->second;
    }
    const auto module = object_in(table.module);
    if (!other.empty() && !module.is_none()) undo.push_back(share(resize(module, other)));
  }
  return [undo] {
    const py::gil_scoped_acquire lock;
    for (const auto& one : undo) (*one)();
  };
}

}  // namespace shoal::python
