#include "comm/shm/host_transport.h"

#include <fmt/format.h>

#include <chrono>
#include <stdexcept>
#include <thread>

#include "comm/rendezvous/liveness.h"
#include "comm/rendezvous/while_waiting.h"
#include "comm/rendezvous/world_state.h"
#include "comm/shm/shared_memory_transport.h"
#include "comm/shm/wait.h"
#include "comm/store/authenticated_store.h"
#include "comm/store/store_gather.h"
#include "shoal/detail/clock.h"
#include "shoal/error.h"

namespace shoal::shm {
namespace {

std::byte* open_block(const WorldState& world, PeerMemory& memory, const Place& place,
                      const std::vector<int>& world_ranks) {
  try {
    return memory.at(place);
  } catch (const std::runtime_error& error) {
    if (const auto fault = world.liveness->check(world_ranks)) throw CommError(fault->text);
    throw CommError(fmt::format("rank {}'s shared memory cannot be opened: {}", world_ranks[0], error.what()));
  }
}

// The others can open rank 0's memory only while rank 0 lives, and a program may end right after it has begun.
void await_others(const WorldState& world, const ControlLayout& control, const std::string& name,
                  const std::vector<int>& world_ranks, Milliseconds limit) {
  const auto deadline = Clock::now() + limit;
  WhileWaiting while_waiting(world.options.while_waiting);
  while (control.block().opened.load() < world_ranks.size()) {
    if (world.watch && world.watch->raised()) throw CommError(world.watch->why());
    if (const auto fault = world.liveness->check(world_ranks)) throw CommError(fault->text);
    while_waiting.look();
    if (Clock::now() > deadline) {
      throw CommError(fmt::format("not all ranks opened the shared memory of group '{}' within {} s", name,
                                  std::chrono::duration<double>(limit).count()));
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

}  // namespace

HostTransport make_host_transport(const WorldState& world, const std::string& name, int rank,
                                  const std::vector<int>& world_ranks, Milliseconds limit) {
  const auto& peers = world.meeting.peers;
  const auto& own = peers[world_ranks[rank]];
  for (const int other : world_ranks) {
    if (peers[other].host != own.host) return {nullptr, fmt::format("rank {} is on another host", other)};
  }
  const int size = static_cast<int>(world_ranks.size());
  std::vector<std::shared_ptr<PeerMemory>> memories(size);
  std::byte* own_block = nullptr;
  std::string line;
  try {
    if (!world.memory) throw std::runtime_error("this system gave no shared memory");
    for (int other = 0; other < size; ++other) {
      if (other != rank) memories[other] = world.memory->peer(peers[world_ranks[other]].page);
    }
    if (rank == 0) {
      own_block = world.memory->allocate(ControlLayout::bytes(size));
      auto& block = ControlLayout(own_block, size).block();
      block.readers = static_cast<uint32_t>(size);
      block.users = static_cast<uint32_t>(size);
    }
    const auto place = own_block == nullptr ? Place{} : *world.memory->locate(own_block, 1);
    line = fmt::format("{} {} ", place.arena, place.offset);
  } catch (const std::exception& error) {
    line = fmt::format("- - {}", error.what());
  }
  std::byte* base = nullptr;
  try {
    const auto topic = "host/" + name;
    const auto lines = store_gather(world, topic, world_ranks, rank, line, limit);
    for (int other = 0; other < size; ++other) {
      if (lines[other][0] != '-') continue;
      if (own_block != nullptr) world.memory->free(own_block);
      return {nullptr, fmt::format("rank {}: {}", world_ranks[other], lines[other].substr(4))};
    }
    const auto key = gathered_key(world, topic, 0);
    const auto offset = lines[0].substr(lines[0].find(' ') + 1);
    const Place place{number_in<uint32_t>(lines[0], key), number_in<uint64_t>(offset, key)};
    base = rank == 0 ? own_block : open_block(world, *memories[0], place, world_ranks);
    const ControlLayout control(base, size);
    control.block().opened.fetch_add(1);
    if (rank == 0) await_others(world, control, name, world_ranks, limit);
  } catch (...) {  // a rank that comes later may still open the block
    auto* memory = world.memory.get();
    if (own_block != nullptr) memory->retire([] { return false; }, [memory, own_block] { memory->free(own_block); });
    throw;
  }
  const ControlLayout control(base, size);
  HostGroup group{name, rank, size, world.memory, std::move(memories), control};
  group.timeline = world.options.timeline;
  return {std::make_shared<SharedMemoryTransport>(std::move(group), world_ranks, cores_suffice(world.local_size),
                                                  own_block),
          ""};
}

}  // namespace shoal::shm
