// Command `shoal doctor`: features of this build and this machine, and how to get missing ones.

#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <torch/version.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <sstream>
#include <thread>

#include "base/environment.h"
#include "base/processors.h"
#include "cli/commands.h"
#include "cli/train/report.h"
#include "comm/mpi/mpi.h"
#include "comm/shm/host_memory.h"
#include "comm/store/store_server.h"
#include "comm/transport/nccl.h"
#include "shoal/error.h"

namespace shoal::cli {
namespace {

using Json = nlohmann::ordered_json;

std::string find_program(const std::string& name) {
  std::istringstream path(process_environment()("PATH").value_or(""));
  std::string folder;
  while (std::getline(path, folder, ':')) {
    auto candidate = folder + "/" + name;
    if (access(candidate.c_str(), X_OK) == 0) return candidate;
  }
  return "";
}

double gib(const std::string& folder) {
  struct statvfs status {};
  if (statvfs(folder.c_str(), &status) != 0) return 0;
  return static_cast<double>(status.f_blocks) * static_cast<double>(status.f_frsize) / (1 << 30);
}

std::string loopback() {
  try {
    const StoreServer server(StorePlace("127.0.0.1", 0));
    return "works";
  } catch (const Error& error) {
    return error.what();
  }
}

std::string fashion_mnist() {
  std::string folder = "/usr/share/datasets/fashion-mnist";
  if (std::filesystem::exists(folder)) return folder;
  return "not installed: apt-get install dataset-fashion-mnist, or --data fashion-mnist:FOLDER";
}

// Tries what every rank does when it meets its peers: allocates memory and opens it as a peer would.
std::string host_transport() {
  try {
    const shm::HostMemory memory;
    const shm::PeerMemory seen(memory.address());
    return "yes";
  } catch (const std::exception& error) {
    return fmt::format("no: {}", error.what());
  }
}

Json examine() {
  struct rlimit files {};
  getrlimit(RLIMIT_NOFILE, &files);
  Json report;
  report["shoal"] = SHOAL_VERSION;
  report["libtorch"] = TORCH_VERSION;
  report["transports"] = {{"host", host_transport()},
                          {"tcp", "yes"},
                          {"gloo", "yes"},
                          {"mpi", why_no_mpi().empty() ? "yes" : why_no_mpi()},
                          {"nccl", nccl_is_built() ? "yes" : "not in this build: it takes a CUDA libtorch"}};
  for (const auto* name : {"torchrun", "mpirun", "srun"}) {
    const auto path = find_program(name);
    report["launchers"][name] = path.empty() ? "not in PATH; shoal launch needs none" : path;
  }
  report["cores"] = std::thread::hardware_concurrency();
  report["usable_cores"] = processors();
  report["memory_gib"] =
      static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE)) / (1 << 30);
  report["dev_shm_gib"] = gib("/dev/shm");
  report["open_files"] = files.rlim_cur;
  report["loopback"] = loopback();
  report["job_secret"] = process_environment()("SHOAL_SECRET")
                             ? "given (SHOAL_SECRET)"
                             : "none: peers of jobs that shoal launch does not start are not authenticated; give all "
                               "ranks one SHOAL_SECRET (SECURITY.md)";
  report["fashion_mnist"] = fashion_mnist();
  return report;
}

void print(const Json& report, const std::string& indent) {
  for (const auto& [name, value] : report.items()) {
    if (value.is_object()) {
      fmt::print("{}{}\n", indent, name);
      print(value, indent + "  ");
    } else if (value.is_number_float()) {
      fmt::print("{}{:<16} {:.1f}\n", indent, name, value.get<double>());
    } else {
      fmt::print("{}{:<16} {}\n", indent, name, value.is_string() ? value.get<std::string>() : value.dump());
    }
  }
}

}  // namespace

void add_doctor_command(CLI::App& app, Action& chosen) {
  auto* command = app.add_subcommand("doctor", "report what this build and this machine support");
  const auto json = std::make_shared<std::string>();
  command->add_option("--json", *json, "write the report as JSON to this file; - is standard output");
  command->callback([json, &chosen] {
    chosen = [json] {
      const auto report = examine();
      if (json->empty()) {
        print(report, "");
      } else {
        write_json(*json, report);
      }
      return 0;
    };
  });
}

}  // namespace shoal::cli
