#pragma once
// Mirror of a Python module: a libtorch module that registers the same tensors under the same names.

#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "wrappers/gil.h"

#include <torch/nn/module.h>

#include "module/walk.h"

namespace shoal::python {

class Mirror : public torch::nn::Module, public HasTransientBuffers, public ResizesBuffers {
 public:
  // Mirror of a torch.nn.Module and its children; a child that occurs twice has one mirror. UsageError for what shoal
  // cannot train: parameters that are not materialised, tensors with Python behaviour of their own, scripted modules.
  static std::shared_ptr<Mirror> of(const py::object& module);

  // Adopts buffers that Python has replaced (Module.to does so). UsageError, which names it, for a parameter, a buffer
  // or a child that was added, removed or replaced: the wrappers know the old one. Buffers with persistent=False that
  // were None or not there are the module's own affair. Call it with the lock.
  void refresh();

  bool is_transient(const std::string& name) const override { return transient_.contains(name); }
  // Asks modules with a _load_from_state_dict() of their own. See shoal/_resized.py. Of the root; call it without the
  // lock.
  std::function<void()> take_shapes(const Shapes& shapes) const override;

 private:
  explicit Mirror(std::string name) : Module(std::move(name)) {}

  struct Slot {
    SharedObject key;
    SharedObject child{};  // weak; nullptr: a tensor or None
    at::Tensor tensor{};   // undefined: a child, or None
    at::Tensor seen{};     // what the module had last: `tensor`, or a buffer in its place
    bool holds(const py::handle& value) const;
  };
  struct Table {
    SharedObject module;     // weak
    SharedObject attribute;  // _parameters, _buffers or _modules
    const char* kind;
    std::string owner;  // name of the module in its root, with a dot
    std::vector<Slot> slots{};
    bool is_buffers() const { return std::string_view(kind) == "buffer"; }
    // Whether it may come and go when it was None, or not there, at construction.
    bool leaves_alone(const py::object& owner_now, const py::handle& key) const;
  };
  struct Walk;

  static void add(const py::object& module, const std::string& name, const std::shared_ptr<Mirror>& made, Walk& walk);
  static void refresh_table(Table& table);

  std::vector<Table> tables_;          // of the root: those of all modules
  std::set<std::string> transient_{};  // of the root: buffers that state_dict() leaves out
};

}  // namespace shoal::python
