#pragma once
// End of a program.

#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#include "base/environment.h"

namespace shoal {

// Ends the process with the exit code, after writing what is still in the buffers of C's streams. Destructors of static
// objects do not run: libtorch's take a third of the time that an empty program with libtorch takes, and a failed
// group's would wait for operations that never finish. Objects on the caller's stack are not destroyed either. Under
// mpirun a success does run them: MPI is shut down at exit.
[[noreturn]] inline void end_process(int code) {
  std::fflush(nullptr);
  const auto environment = process_environment();
  for (const auto* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK"}) {
    if (code == 0 && environment(name)) std::exit(code);
  }
#ifdef SHOAL_SANITIZED
  if (code == 0) std::exit(code);  // reports leaks
#endif
  std::_Exit(code);
}

}  // namespace shoal
