#include "backend/interrupts.h"

#include <pybind11/pybind11.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace shoal::python {

void run_signal_handlers() {
  // Asked before the GIL: another thread might never get it while the interpreter ends.
  if (syscall(SYS_gettid) != getpid()) return;
  const pybind11::gil_scoped_acquire lock;
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

}  // namespace shoal::python
