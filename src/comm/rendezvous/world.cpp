#include "shoal/world.h"

#include <ATen/Context.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>
#include <numeric>

#include "comm/group/group_state.h"
#include "comm/rendezvous/socket.h"
#include "comm/rendezvous/world_state.h"
#include "comm/transport/choose_transport.h"
#include "shoal/error.h"

namespace shoal {
namespace {

// Address of the interface with the route to the store: loopback for a job on one host. Sends nothing.
std::string address_towards(const std::string& host, int port) {
  SocketAddress address;
  try {
    address = resolve(host, port);
  } catch (const std::runtime_error& error) {
    throw UsageError(fmt::format("cannot resolve MASTER_ADDR '{}': {}", host, error.what()));
  }
  const auto socket = make_socket(address, SOCK_DGRAM);
  if (!connect_to(socket, address)) {
    throw UsageError(fmt::format("no network interface has a route to MASTER_ADDR '{}'", host));
  }
  return own_address(socket).host();
}

void count_local_ranks(WorldState& state) {
  const auto& peers = state.meeting.peers;
  state.local_size = 0;
  for (int rank = 0; rank < state.placement.size; ++rank) {
    if (peers[rank].host != peers[state.placement.rank].host) continue;
    if (rank == state.placement.rank) state.local_rank = state.local_size;
    ++state.local_size;
  }
}

std::unique_ptr<FlightRecorder> make_recorder(const WorldOptions& options, const Placement& placement) {
  const auto folder =
      options.flight_recorder ? options.flight_recorder : process_environment()("SHOAL_FLIGHT_RECORDER");
  if (!folder) return nullptr;
  return std::make_unique<FlightRecorder>(*folder, placement.rank, placement.size);
}

std::vector<ProcessId> processes(const Meeting& meeting) {
  std::vector<ProcessId> list;
  for (const auto& peer : meeting.peers) list.push_back(peer.process);
  return list;
}

}  // namespace

void WorldOptions::validate() const {
  std::vector<std::string> faults;
  if (rank.has_value() != size.has_value()) faults.emplace_back("rank and size: give both or neither");
  const auto transports = transport_names();
  if (std::find(transports.begin(), transports.end(), transport) == transports.end()) {
    faults.push_back(
        fmt::format("transport '{}' is not in this build; it has: {}", transport, fmt::join(transports, ", ")));
  }
  if (rendezvous_timeout_seconds < 1) faults.emplace_back("rendezvous_timeout_seconds must be at least 1");
  if (timeout_seconds < 1) faults.emplace_back("timeout_seconds must be at least 1");
  if (stopped_timeout_seconds < 1) faults.emplace_back("stopped_timeout_seconds must be at least 1");
  if (!faults.empty()) throw UsageError(fmt::format("world options: {}", fmt::join(faults, "; ")));
}

World::World(std::shared_ptr<WorldState> state, Group group) : state_(std::move(state)), group_(std::move(group)) {}

int World::rank() const {
  return state_->placement.rank;
}
int World::size() const {
  return state_->placement.size;
}
int World::local_rank() const {
  return state_->local_rank;
}
int World::local_size() const {
  return state_->local_size;
}
const std::string& World::source() const {
  return state_->placement.source;
}
const Group& World::group() const {
  return group_;
}

void World::barrier() const {
  group_.barrier().wait();
}
double World::all_reduce(double value, ReduceOp op) const {
  return group_.all_reduce(value, op);
}
std::vector<double> World::all_reduce(std::vector<double> values, ReduceOp op) const {
  return group_.all_reduce(std::move(values), op);
}

void World::print_line(const std::string& line) {
  fmt::print("{}\n", line);
  std::fflush(stdout);
}

void World::manual_seed(uint64_t seed) const {
  at::manual_seed(seed + static_cast<uint64_t>(rank()));
}

World init(const WorldOptions& options) {
  options.validate();
  quiet_c10d();
  auto state = std::make_shared<WorldState>();
  state->options = options;
  state->placement = find_placement(options, process_environment());
  try {
    state->memory = std::make_shared<HostMemory>();
  } catch (const std::runtime_error&) {  // NOLINT(bugprone-empty-catch): the host transport reports it on use
  }
  state->recorder = make_recorder(options, state->placement);
  state->meeting = (options.rejoin ? meet_again : meet)(
      state->placement, state->memory ? state->memory->address() : PageAddress{}, options.rendezvous_timeout_seconds);
  state->liveness =
      std::make_unique<Liveness>(state->meeting, state->placement, state->memory, options.stopped_timeout_seconds);
  if (state->recorder) state->recorder->join(processes(state->meeting));
  count_local_ranks(*state);
  if (state->placement.size > 1) {
    state->listen_address = address_towards(state->placement.address, state->placement.port);
  }
  std::vector<int> everyone(state->placement.size);
  std::iota(everyone.begin(), everyone.end(), 0);
  Group group(make_group_state(state, world_group_name, everyone));
  return {std::move(state), std::move(group)};
}

}  // namespace shoal
