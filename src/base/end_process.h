#pragma once
// End of a program.

#include <cstdio>
#include <cstdlib>

namespace shoal {

// Ends the process with the exit code, after writing what is still in the buffers of C's streams. Destructors of static
// objects do not run: libtorch's take a third of the time that an empty program with libtorch takes, and a failed group's
// would wait for operations that never finish. Objects on the caller's stack are not destroyed either.
[[noreturn]] inline void end_process(int code) {
  std::fflush(nullptr);
#ifdef SHOAL_SANITIZED
  if (code == 0) std::exit(code);  // reports leaks
#endif
  std::_Exit(code);
}

}  // namespace shoal
