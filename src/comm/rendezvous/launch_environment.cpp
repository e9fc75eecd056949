#include "comm/rendezvous/launch_environment.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <functional>
#include <iterator>
#include <string_view>

#include "base/limits.h"
#include "shoal/error.h"

namespace shoal {
namespace {

struct Source {
  const char* rank;
  const char* size;
};

// One entry per launcher. A job started by torchrun inside an sbatch script also has Slurm's variables, so only the
// first source that is present is used, as a whole.
constexpr Source sources[] = {{"RANK", "WORLD_SIZE"},
                              {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
                              {"PMI_RANK", "PMI_SIZE"},
                              {"SLURM_PROCID", "SLURM_NTASKS"}};

constexpr const char* shell_step = "4294967290";  // SLURM_STEP_ID of salloc's shell

int to_int(const std::string& name, const std::string& text) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw UsageError(fmt::format("{}='{}' is not a number", name, text));
  }
  return value;
}

// The first host of Slurm's compressed list: "node[03-07,12],other1" -> "node03".
std::string first_host(const std::string& list) {
  const auto bracket = list.find('[');
  const auto comma = list.find(',');
  if (bracket == std::string::npos || comma < bracket) return list.substr(0, comma);
  const auto end = list.find_first_of(",-]", bracket);
  return list.substr(0, bracket) + list.substr(bracket + 1, end - bracket - 1);
}

// A port that differs from job to job on one host and is the same on all ranks of a job.
int port_from(const std::string& job) {
  return 20000 + static_cast<int>(std::hash<std::string>()(job) % 12000);
}

bool is_slurm(const Source& source) {
  return std::string_view(source.rank) == "SLURM_PROCID";
}

bool has_one_node(const Environment& environment) {
  return environment("SLURM_NNODES").value_or("1") == "1";
}

// For Slurm that of the step: SLURM_NTASKS may be the allocation's in it, as in a shell of srun --preserve-env.
std::optional<std::string> size_of(const Source& source, const Environment& environment) {
  const auto of_step =
      is_slurm(source) && environment("SLURM_STEP_ID") ? environment("SLURM_STEP_NUM_TASKS") : std::nullopt;
  return of_step ? of_step : environment(source.size);
}

// A value that is left over from elsewhere would make each process of a launcher a training of its own. Launchers of
// ranks within another launcher's process say who they are: torchrun and its like, and Ray, whose workers know their
// raylet. LOCAL_WORLD_SIZE alone may be left over, too.
void refuse_contradiction(const Source& chosen, const Environment& environment) {
  if (environment("TORCHELASTIC_RUN_ID")) return;
  if (environment("RAY_RAYLET_PID") && environment("LOCAL_WORLD_SIZE") == "1") return;
  for (const auto* other = &chosen + 1; other != std::end(sources); ++other) {
    const auto rank = environment(other->rank);
    const auto size = size_of(*other, environment);
    if (!rank || !size || *size == "1") continue;
    if (is_slurm(*other) && environment("SLURM_STEP_ID").value_or(shell_step) == shell_step) continue;
    throw UsageError(
        fmt::format("{0}={1} and {2}=1 say that this rank is alone, but {3}={4} and {5}={6} that it is one of several: "
                    "unset {0} and {2} to train together, or {3} and {5} to run alone",
                    chosen.rank, *environment(chosen.rank), chosen.size, other->rank, *rank, other->size, *size));
  }
}

void find_rank(Placement& placement, const WorldOptions& options, const Environment& environment) {
  if (options.rank && options.size) {
    placement.rank = *options.rank;
    placement.size = *options.size;
    placement.source = "options";
    return;
  }
  for (const auto& source : sources) {
    const auto rank = environment(source.rank);
    const auto size = size_of(source, environment);
    if (!rank && !size) continue;
    // A shell inside an allocation has SLURM_NTASKS, and a batch script SLURM_PROCID as well, but neither is a task;
    // nor is the shell of salloc, which runs in a step of its own (Slurm's SLURM_INTERACTIVE_STEP).
    const bool slurm = is_slurm(source);
    const auto step = environment("SLURM_STEP_ID");
    const bool shell = step == shell_step;
    const bool single = size.value_or("1") == "1" && has_one_node(environment);
    if (slurm && (!rank || shell || (!step && single))) continue;
    if (slurm && !step) {
      throw UsageError(fmt::format(
          "this is Slurm's batch script and no task of a step, though SLURM_NTASKS is {}: start the program "
          "with srun, torchrun or shoal launch; to run alone, unset SLURM_PROCID",
          size.value_or("not set")));
    }
    if (!rank || !size) {
      throw UsageError(fmt::format("{} is set but {} is not: set both, or neither to run alone",
                                   rank ? source.rank : source.size, rank ? source.size : source.rank));
    }
    placement.rank = to_int(source.rank, *rank);
    placement.size = to_int(source.size, *size);
    placement.source = fmt::format("{} and {}", source.rank, source.size);
    if (placement.size == 1) refuse_contradiction(source, environment);
    return;
  }
  placement.source = "alone";
}

// Tasks of srun --mpi=pmi2 get their ranks from PMI.
bool is_slurm_task(const Placement& placement, const Environment& environment) {
  const bool by_srun = placement.source.rfind("SLURM", 0) == 0 || placement.source.rfind("PMI", 0) == 0;
  return by_srun && environment("SLURM_STEP_ID");
}

void find_address(Placement& placement, const WorldOptions& options, const Environment& environment) {
  const auto address = environment("MASTER_ADDR");
  const auto port = environment("MASTER_PORT");
  const bool slurm = is_slurm_task(placement, environment);
  placement.address = options.address.value_or(address.value_or("127.0.0.1"));
  if (!options.address && !address && slurm && !has_one_node(environment)) {
    const auto nodes = environment("SLURM_STEP_NODELIST");
    if (!nodes)
      throw UsageError("the job runs on several Slurm nodes, but SLURM_STEP_NODELIST is not set; set MASTER_ADDR");
    placement.address = first_host(*nodes);
  }
  if (options.port || port) {
    placement.port = options.port ? *options.port : to_int("MASTER_PORT", *port);
  } else if (const auto job = environment("PMIX_NAMESPACE"); job && placement.source.rfind("OMPI", 0) == 0) {
    placement.port = port_from(*job);
  } else if (const auto id = environment("SLURM_JOB_ID"); id && slurm) {
    placement.port = port_from(*id + "." + *environment("SLURM_STEP_ID"));
  } else {
    placement.port = 29500;
  }
}

// Name that the launcher gives the job.
std::string find_name(const Placement& placement, const Environment& environment) {
  if (const auto own = environment("SHOAL_JOB_ID")) return *own;
  if (placement.source.rfind("RANK", 0) == 0) return environment("TORCHELASTIC_RUN_ID").value_or("");
  if (placement.source.rfind("OMPI", 0) == 0) return environment("PMIX_NAMESPACE").value_or("");
  if (!is_slurm_task(placement, environment)) return "";
  const auto id = environment("SLURM_JOB_ID");
  return id ? *id + "." + *environment("SLURM_STEP_ID") : "";
}

}  // namespace

void refuse_contradiction(const Environment& environment) {
  const auto& first = sources[0];
  if (environment(first.rank) && environment(first.size) == "1") refuse_contradiction(first, environment);
}

bool in_batch_script_of_one_node(const Environment& environment) {
  const auto is_set = [&](const Source& source) { return environment(source.rank) || environment(source.size); };
  const auto* first = std::find_if(std::begin(sources), std::end(sources), is_set);
  if (first == std::end(sources) || !is_slurm(*first)) return false;
  return environment(first->rank) && !environment("SLURM_STEP_ID") && has_one_node(environment);
}

std::string store_name(const Placement& placement) {
  return placement.port > 0 ? fmt::format("{}:{}", placement.address, placement.port) : placement.address;
}

Placement find_placement(const WorldOptions& options, const Environment& environment) {
  Placement placement;
  find_rank(placement, options, environment);
  find_address(placement, options, environment);
  placement.job = JobIdentity(find_name(placement, environment), environment("SHOAL_SECRET").value_or(""));
  // torchrun's agent and `shoal launch` serve the store and say so; this applies to their own ranks only.
  placement.store_is_served = placement.source == "RANK and WORLD_SIZE" && !options.address && !options.port &&
                              environment("TORCHELASTIC_USE_AGENT_STORE").value_or("") == "True";
  if (placement.store_is_served) placement.generation = environment("TORCHELASTIC_RESTART_COUNT").value_or("0");
  if (placement.size < 1) {
    throw UsageError(fmt::format("world size {} ({}): give at least 1", placement.size, placement.source));
  }
  if (placement.size > max_ranks) {
    throw UsageError(
        fmt::format("world size {} ({}): it may be at most {}", placement.size, placement.source, max_ranks));
  }
  if (placement.rank < 0 || placement.rank >= placement.size) {
    throw UsageError(fmt::format("rank {} of a world of {} ({}): ranks are 0 to {}", placement.rank, placement.size,
                                 placement.source, placement.size - 1));
  }
  if (placement.port < 1 || placement.port > 65535) {
    throw UsageError(fmt::format("MASTER_PORT {}: a port is 1 to 65535", placement.port));
  }
  return placement;
}

}  // namespace shoal
