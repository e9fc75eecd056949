// Substitute for mpi.cpp in the wheel's library: mpi.cpp lies in a library of its own, which is loaded when the
// transport is asked for, so that the wheel needs no MPI.

#include <dlfcn.h>
#include <fmt/format.h>

#include <filesystem>

#include "comm/mpi/mpi.h"
#include "shoal/error.h"

namespace shoal {
namespace {

using Connect = decltype(shoal_connect_over_mpi);

struct Module {
  Connect* connect = nullptr;
  std::string why_not;
};

// Beside the library that this function is in.
std::string path_of_module() {
  Dl_info library;
  if (dladdr(reinterpret_cast<void*>(&path_of_module), &library) == 0) return {};
  return std::filesystem::path(library.dli_fname).replace_filename("libshoal_mpi.so").string();
}

Module load() {
  Module module;
  if (void* const handle = dlopen(path_of_module().c_str(), RTLD_NOW | RTLD_LOCAL)) {
    module.connect = reinterpret_cast<Connect*>(dlsym(handle, "shoal_connect_over_mpi"));
  }
  if (module.connect == nullptr) {
    const char* const error = dlerror();
    module.why_not =
        fmt::format("{}; this package takes the MPI that it was built with: install Open MPI 4 (Debian: libopenmpi3)",
                    error != nullptr ? error : "no shoal_connect_over_mpi");
  }
  return module;
}

// Loaded once and kept: MPI does not bear to be unloaded.
const Module& loaded() {
  static const Module module = load();
  return module;
}

}  // namespace

bool mpi_is_built() {
  return true;
}

std::string why_no_mpi() {
  return loaded().why_not;
}

std::shared_ptr<Transport> make_mpi_transport(const WorldState& world, const std::vector<int>& world_ranks, int rank,
                                              Milliseconds limit) {
  if (loaded().connect == nullptr) throw UsageError("transport mpi: " + loaded().why_not);
  std::shared_ptr<Transport> made;
  loaded().connect(world, world_ranks, rank, limit, made);
  return made;
}

}  // namespace shoal
