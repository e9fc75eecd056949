#include "comm/transport/choose_transport.h"

#include <fmt/format.h>

#include <algorithm>

#include "comm/hierarchical/hierarchical.h"
#include "comm/mpi/mpi.h"
#include "comm/rendezvous/gpus.h"
#include "comm/rendezvous/world_state.h"
#include "comm/shm/host_transport.h"
#include "comm/store/store_gather.h"
#include "comm/tcp/tcp_transport.h"
#include "comm/transport/absent.h"
#include "comm/transport/by_device.h"
#include "comm/transport/gloo.h"
#include "comm/transport/identity.h"
#include "comm/transport/nccl.h"
#include "shoal/error.h"

namespace shoal {
namespace {

// Hierarchical transport: host transports within hosts, tcp between them; nullptr if hosts have different numbers of
// ranks or some host cannot share memory.
std::shared_ptr<Transport> make_spanning(const WorldState& world, const std::string& name, int rank,
                                         const std::vector<int>& world_ranks, Milliseconds limit) {
  std::vector<std::string> hosts;
  for (const int of : world_ranks) hosts.push_back(world.meeting.peers[of].host);
  const auto grid = make_host_grid(hosts, rank);
  if (!grid) return nullptr;
  std::vector<int> local_ranks;
  for (const int of : grid->ranks[grid->host]) local_ranks.push_back(world_ranks[of]);
  const auto inside = [&](const char* use) {
    return shm::make_host_transport(world, fmt::format("{}/{}/{}", name, use, grid->host), grid->local, local_ranks,
                                    limit)
        .transport;
  };
  HierarchicalParts parts{*grid, inside("up"), inside("down"), nullptr, nullptr, world.memory};
  const bool possible = parts.up && parts.down;
  const auto others = store_gather(world, name + "/spanning", world_ranks, rank, possible ? "yes" : "no", limit);
  if (std::count(others.begin(), others.end(), "yes") != static_cast<int64_t>(others.size())) return nullptr;
  std::vector<int> across;
  for (const auto& ranks : grid->ranks) across.push_back(world_ranks[ranks[grid->local]]);
  parts.across = make_tcp_transport(world, fmt::format("{}/across/{}", name, grid->local), grid->host, across, limit);
  parts.flat = make_tcp_transport(world, name + "/flat", rank, world_ranks, limit);
  return make_hierarchical_transport(std::move(parts));
}

// Shared memory on one host, the hierarchical transport over several, tcp otherwise.
std::shared_ptr<Transport> make_fastest(const WorldState& world, const std::string& name, int rank,
                                        const std::vector<int>& world_ranks, Milliseconds limit) {
  if (auto host = shm::make_host_transport(world, name, rank, world_ranks, limit).transport) return host;
  if (auto spanning = make_spanning(world, name, rank, world_ranks, limit)) return spanning;
  return make_tcp_transport(world, name, rank, world_ranks, limit);
}

// Transport of tensors of the CPU.
std::shared_ptr<Transport> make_cpu_transport(const WorldState& world, const std::string& name, int rank,
                                              const std::vector<int>& world_ranks, Milliseconds limit) {
  const auto& wanted = world.options.transport;
  if (wanted == "mpi") return make_mpi_transport(world, world_ranks, rank, limit);
  if (wanted == "tcp") return make_tcp_transport(world, name, rank, world_ranks, limit);
  if (wanted == "gloo") {
    // Gloo does not say who is missing.
    store_gather(world, "ranks-over-gloo/" + name, world_ranks, rank, "here", limit);
    return make_gloo_transport(world, name, rank, static_cast<int>(world_ranks.size()), limit);
  }
  if (wanted != "host") return make_fastest(world, name, rank, world_ranks, limit);
  auto host = shm::make_host_transport(world, name, rank, world_ranks, limit);
  if (host.transport) return host.transport;
  throw UsageError(
      fmt::format("transport host cannot serve group '{}': {}; use transport auto or tcp", name, host.why_not));
}

}  // namespace

std::vector<std::string> transport_names() {
  std::vector<std::string> names = {"auto", "host", "tcp", "gloo"};
  if (mpi_is_built()) names.emplace_back("mpi");
  if (nccl_is_built()) names.emplace_back("nccl");
  return names;
}

std::shared_ptr<Transport> choose_transport(const WorldState& world, const std::string& name, int rank,
                                            const std::vector<int>& world_ranks, Milliseconds limit) {
  const auto& wanted = world.options.transport;
  const auto size = static_cast<int>(world_ranks.size());
  if (size == 1) return make_identity_transport();
  if (world.options.rejoin && name == world_group_name) return make_absent_transport();
  auto cpu = make_cpu_transport(world, name, rank, world_ranks, limit);
  const auto cpu_name = cpu->name();
  if (wanted == "nccl") {
    return make_transport_by_device("nccl", std::move(cpu), nccl_side(world, name, rank, size));
  }
  // A generation of an elastic job may have newcomers, whose GPUs the others do not know.
  const bool is_elastic = world.watch || world.join.table || world.join.over_hosts;
  const bool nccl = wanted == "auto" && nccl_is_built() && !is_elastic && gpu_for_each_rank(world.meeting.peers);
  return make_transport_by_device(cpu_name, std::move(cpu), nccl ? nccl_side(world, name, rank, size) : DeviceSide{});
}

}  // namespace shoal
