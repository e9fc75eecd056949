#pragma once
// Python functions that the engine calls.

#include <functional>
#include <string>
#include <utility>

#include "shoal/error.h"
#include "wrappers/gil.h"

namespace shoal::python {

// Rethrows what Python code has raised: shoal's errors as those of C++, which the engine knows; others as they are, for
// unlocked(). Call it with the lock.
[[noreturn]] void rethrow(pybind11::error_already_set& raised);

// What Python code has raised last, on this thread, if it was one of shoal's errors; nullptr: nothing.
SharedObject& last_raised();

// As unlocked(). If an error of shoal comes out that Python code has raised in it, it is that one, with its class and
// traceback.
template <class Act>
auto unlocked_with_calls(const Act& act) {
  // Its traceback keeps whatever the program had in its frames, such as the graph of a step that was undone.
  const struct Forget {
    ~Forget() { last_raised() = nullptr; }
  } forget;
  try {
    return unlocked(act);
  } catch (const Error& error) {
    const auto raised = std::exchange(last_raised(), nullptr);
    if (!raised || py::str(*raised).template cast<std::string>() != error.what()) throw;
    PyErr_Restore(py::type::of(*raised).release().ptr(), py::object(*raised).release().ptr(),
                  PyException_GetTraceback(raised->ptr()));
    throw py::error_already_set();
  }
}

// Calls `function`, which may be called without the lock, and returns its result.
template <class... Arguments>
SharedObject call(const SharedObject& function, Arguments... arguments) {
  const py::gil_scoped_acquire lock;
  try {
    return share((*function)(arguments...));
  } catch (py::error_already_set& raised) {
    rethrow(raised);
  }
}

// Calls function(argument) while torch.compile compiles nothing. As torch.compiler.disable does, whose import takes
// seconds.
py::object call_uncompiled(const py::function& function, const py::object& argument);

}  // namespace shoal::python
