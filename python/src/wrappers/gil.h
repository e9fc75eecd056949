#pragma once
// Python's lock around what C++ owns and calls.

#include <c10/util/ScopeExit.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <utility>

namespace shoal::python {

namespace py = pybind11;

// Reference to a Python object that C++ may copy and destroy without the lock.
using SharedObject = std::shared_ptr<py::object>;

inline SharedObject share(py::object object) {
  return {new py::object(std::move(object)), [](py::object* held) {
            if (Py_IsInitialized() == 0) return;  // the interpreter has taken its objects along
            const py::gil_scoped_acquire lock;
            delete held;
          }};
}

// A weak reference. Python's garbage collector sees nothing of what C++ holds, and a user's object may lead to the
// wrapper, so that both would stay for ever: wrappers in Python keep such objects, and C++ refers to them. Call it with
// the lock.
inline SharedObject share_weakly(const py::object& object) {
  return share(py::weakref(object));
}

// The object; none: its weak reference has outlived it. Call it with the lock.
inline py::object object_in(const SharedObject& reference) {
  auto* held = reference->ptr();
  if (!PyWeakref_Check(held)) return *reference;
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* object = nullptr;
  return PyWeakref_GetRef(held, &object) == 1 ? py::reinterpret_steal<py::object>(object) : py::none();
#else
  return py::reinterpret_borrow<py::object>(PyWeakref_GetObject(held));
#endif
}

// Deleter of bound objects: destructors may wait for threads that need the lock.
struct DeleteUnlocked {
  template <class T>
  void operator()(T* object) const {
    const py::gil_scoped_release unlocked;
    delete object;
  }
};
template <class T>
using Held = std::unique_ptr<T, DeleteUnlocked>;

// The frame of Python that this thread has left for C++ of shoal; nullptr: none. Only compared.
inline PyFrameObject*& frame_left() {
  thread_local PyFrameObject* frame = nullptr;
  return frame;
}

// Whether C++ of shoal, which catches errors by their classes in C++, has called what runs here, and no Python in
// between. Call it with the lock.
inline bool is_called_by_shoal() {
  return frame_left() != nullptr && PyEval_GetFrame() == frame_left();
}

// `act` without the lock, for whatever waits or computes. An exception of Python code that it has called stays what it
// is.
template <class Act>
auto unlocked(Act&& act) {
  const auto restore =
      c10::make_scope_exit([former = std::exchange(frame_left(), PyEval_GetFrame())] { frame_left() = former; });
  try {
    const py::gil_scoped_release released;
    return act();
  } catch (python_error& error) {
    error.restore();
    throw py::error_already_set();
  }
}

}  // namespace shoal::python
