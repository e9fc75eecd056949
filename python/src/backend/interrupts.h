#pragma once
// Ctrl-C during a wait in C++.

namespace shoal::python {

// Runs Python's signal handlers, as the interpreter does between two instructions, and throws what they raise
// (KeyboardInterrupt). Does nothing in other threads than the main one, which alone may run them. Works with and
// without the GIL.
void run_signal_handlers();

}  // namespace shoal::python
