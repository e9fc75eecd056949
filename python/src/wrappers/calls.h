#pragma once
// Python functions that the engine calls.

#include <functional>

#include "wrappers/gil.h"

namespace shoal::python {

// Rethrows what Python code has raised: shoal's errors as those of C++, which the engine knows; others as they are, for
// unlocked(). Call it with the lock.
[[noreturn]] void rethrow(pybind11::error_already_set& raised);

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

}  // namespace shoal::python
