#include "shoal/world.h"

#include <ATen/Context.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>
#include <numeric>

#include "comm/group/group_state.h"
#include "comm/membership/store_table.h"
#include "comm/rendezvous/gpus.h"
#include "comm/rendezvous/socket.h"
#include "comm/rendezvous/world_state.h"
#include "comm/store/given_store.h"
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

// As address_towards(), of the store. A name may have addresses that other hosts do not reach: processes of rank 0's
// host, which reach all of them, take the one that another host has reached. port: of the store.
std::string address_for_peers(const WorldState& state, int port) {
  const auto& peers = state.meeting.peers;
  const auto& own = peers[state.placement.rank];
  const auto& place = state.placement;
  std::string reached = own.store.empty() ? reached_address(place.address, port) : own.store;
  if (own.host == peers[0].host) {
    // A store that the program gave may be on that host, whose loopback interface or link is no place for this one.
    const auto is_elsewhere = [&](const Peer& peer) {
      const bool of_its_own = is_loopback(peer.store) || peer.store.find('%') != std::string::npos;
      return peer.host != own.host && !peer.store.empty() && !of_its_own;
    };
    const auto other = std::find_if(peers.begin(), peers.end(), is_elsewhere);
    if (other != peers.end()) reached = other->store;
  }
  return address_towards(reached, port);
}

// A newcomer has none: its group of one rank has nothing to record, and those that follow are not recorded on any rank.
std::unique_ptr<FlightRecorder> make_recorder(const WorldOptions& options, const Placement& placement,
                                              const JoinPlace& join) {
  if (join.number) return nullptr;
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

void count_local_ranks(WorldState& state) {
  const auto& peers = state.meeting.peers;
  state.local_size = 0;
  for (int rank = 0; rank < state.placement.size; ++rank) {
    if (peers[rank].host != peers[state.placement.rank].host) continue;
    if (rank == state.placement.rank) state.local_rank = state.local_size;
    ++state.local_size;
  }
}

Group make_world_group(const std::shared_ptr<WorldState>& state) {
  std::vector<int> everyone(state->placement.size);
  std::iota(everyone.begin(), everyone.end(), 0);
  return Group(make_group_state(state, world_group_name, everyone));
}

const std::shared_ptr<WorldCell>& cell_of(const World& world) {
  return world.cell_;
}

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

World::World(std::shared_ptr<WorldState> state, Group group)
    : cell_(std::make_shared<WorldCell>(WorldCell{std::move(state), std::move(group)})) {}

int World::rank() const {
  return cell_->state->placement.rank;
}
int World::size() const {
  return cell_->state->placement.size;
}
int World::local_rank() const {
  return cell_->state->local_rank;
}
int World::local_size() const {
  return cell_->state->local_size;
}
bool World::joining() const {
  return cell_->state->join.number.has_value();
}
const std::string& World::source() const {
  return cell_->state->placement.source;
}
const Group& World::group() const {
  return cell_->group;
}

void World::barrier() const {
  group().barrier().wait();
}
double World::all_reduce(double value, ReduceOp op) const {
  return group().all_reduce(value, op);
}
std::vector<double> World::all_reduce(std::vector<double> values, ReduceOp op) const {
  return group().all_reduce(std::move(values), op);
}

void World::print_line(const std::string& line) {
  fmt::print("{}\n", line);
  std::fflush(stdout);
}

void World::manual_seed(uint64_t seed) const {
  at::manual_seed(seed + static_cast<uint64_t>(cell_->state->join.number.value_or(rank())));
}

namespace {

using Meet = std::function<Meeting(const Placement&, const shm::PageAddress&, const std::string& gpus)>;

// The world of a process whose place in the job is known. meet: meets the other ranks.
std::shared_ptr<WorldState> enter_world(const WorldOptions& options, Placement placement, const Meet& meet,
                                        JoinPlace join = {}) {
  auto state = std::make_shared<WorldState>();
  state->join = std::move(join);
  state->options = options;
  state->placement = std::move(placement);
  try {
    state->memory = std::make_shared<shm::HostMemory>();
  } catch (const std::runtime_error&) {  // NOLINT(bugprone-empty-catch): the host transport reports it on use
  }
  state->recorder = make_recorder(options, state->placement, state->join);
  const bool gpus_decide = state->placement.size > 1 && options.transport == "auto";
  state->meeting = meet(state->placement, state->memory ? state->memory->address() : shm::PageAddress{},
                        gpus_decide ? visible_gpus() : "");
  state->liveness =
      std::make_unique<Liveness>(state->meeting, state->placement, state->memory, options.stopped_timeout_seconds);
  if (state->recorder) state->recorder->join(processes(state->meeting));
  count_local_ranks(*state);
  return state;
}

World with_group(std::shared_ptr<WorldState> state) {
  auto group = make_world_group(state);
  return {std::move(state), std::move(group)};
}

Placement place_in_store(const c10::intrusive_ptr<c10d::Store>& store, const WorldOptions& options) {
  if (!options.rank || !options.size) {
    throw UsageError("shoal::init with a store: options.rank and options.size are required");
  }
  if (options.rejoin) throw UsageError("shoal::init with a store: rejoin needs the store of shoal launch");
  auto placement =
      find_placement({.rank = options.rank, .size = options.size}, [](const std::string&) { return std::nullopt; });
  placement.address = describe_store(store);
  placement.port = 0;
  placement.store_is_served = true;
  placement.source = "the program's store";
  const auto server = server_of(store);
  if (server && *options.size > 1) placement.reached = reached_address(server->host, server->port);
  placement.generation = process_environment()("TORCHELASTIC_RESTART_COUNT").value_or("0");
  // As the launcher has it, which writes to its store, too.
  const auto named = process_environment()("SHOAL_JOB_ID");
  const auto name = named ? *named : process_environment()("TORCHELASTIC_RUN_ID").value_or("");
  placement.job = JobIdentity(name, process_environment()("SHOAL_SECRET").value_or(""));
  return placement;
}

// The store to which the launcher of these ranks writes, once it is asked for: torch.distributed gives a part of it.
// Nothing for other ranks than those that a launcher has started, whose numbers say nothing of its processes.
std::function<StorePtr()> launchers_store(const c10::intrusive_ptr<c10d::Store>& store, const Placement& placement,
                                          int limit) {
  const auto environment = process_environment();
  if (environment("RANK") != std::to_string(placement.rank)) return {};
  if (environment("WORLD_SIZE") != std::to_string(placement.size)) return {};
  return [=, job = placement.job, whole = StorePtr()]() mutable {
    if (!whole) whole = guard_store(innermost(store), limit, job);
    return whole;
  };
}

// How this process can take part in an elastic job. A newcomer has a place of its own until it has joined.
JoinPlace join_of(Placement& own_place) {
  auto join = find_join(process_environment());
  if (join.number) {
    own_place.rank = 0;
    own_place.size = 1;
    own_place.source = newcomer_variable;
  } else if ((join.table && join.table->first_ranks() != own_place.size) ||
             (join.over_hosts && join.over_hosts->first_ranks != own_place.size)) {
    join = {};  // another world than the job's
  }
  if (!join.number && process_environment()("WORLD_SIZE") != std::to_string(own_place.size)) join.min_ranks = 0;
  if (join.over_hosts) {
    own_place.address = join.over_hosts->address;
    own_place.port = join.over_hosts->port;
  }
  return join;
}

// Of a job that ranks of other hosts may join: others reach this process from there, and a newcomer finds the job in
// its store.
void find_open_job(WorldState& state) {
  if (!state.join.over_hosts) return;
  const auto& place = state.placement;
  state.listen_address = address_for_peers(state, place.port);
  if (!state.join.number) return;
  auto store = std::make_shared<PatientStore>(connect_to_job(place, state.options.rendezvous_timeout_seconds));
  state.join.table = std::make_shared<StoreTable>(std::move(store), place.generation, *state.join.over_hosts);
}

}  // namespace

World init(const WorldOptions& options) {
  options.validate();
  quiet_c10d();
  const auto how = options.rejoin ? meet_again : meet;
  auto own_place = find_placement(options, process_environment());
  auto join = join_of(own_place);
  if (join.number && options.rejoin) {
    throw UsageError(
        "rejoin: this process is a newcomer of an elastic job (SHOAL_JOIN), which joins by shoal::Elastic");
  }
  auto state = enter_world(
      options, std::move(own_place),
      [&](const Placement& placement, const shm::PageAddress& page, const std::string& gpus) {
        return how(placement, page, gpus, options);
      },
      std::move(join));
  const auto& place = state->placement;
  if (place.size > 1 && !state->join.over_hosts) state->listen_address = address_for_peers(*state, place.port);
  find_open_job(*state);
  return with_group(std::move(state));
}

World init(const c10::intrusive_ptr<c10d::Store>& store, const WorldOptions& options) {
  options.validate();
  const int limit = options.rendezvous_timeout_seconds;
  auto own_place = place_in_store(store, options);
  auto join = join_of(own_place);
  auto state = enter_world(
      options, std::move(own_place),
      [&](const Placement& placement, const shm::PageAddress& page, const std::string& gpus) {
        return meet_in(guard_store(store, limit, placement.job), launchers_store(store, placement, limit), placement,
                       page, gpus, options);
      },
      std::move(join));
  state->listen_address = "127.0.0.1";
  if (state->local_size < state->placement.size && !state->join.over_hosts) {
    const auto server = server_of(store);
    if (!server) {
      throw UsageError(
          "ranks on several hosts need a TCPStore (init_method env:// or tcp://): this rank does not know "
          "under which address the others reach it");
    }
    state->listen_address = address_for_peers(*state, server->port);
    state->placement.address = server->host;
    state->placement.port = server->port;
  }
  find_open_job(*state);
  return with_group(std::move(state));
}

}  // namespace shoal
