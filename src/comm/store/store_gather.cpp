#include "comm/store/store_gather.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <thread>

#include "comm/rendezvous/world_state.h"
#include "shoal/error.h"

namespace shoal {

using SteadyClock = std::chrono::steady_clock;

std::string gathered_key(const WorldState& world, const std::string& topic, size_t of) {
  return fmt::format("{}/exchange/{}/{}", world.meeting.prefix, topic, of);
}

std::vector<std::string> store_gather(const WorldState& world, const std::string& topic,
                                      const std::vector<int>& world_ranks, int rank, const std::string& own,
                                      std::chrono::milliseconds limit) {
  const auto key = [&](size_t of) { return gathered_key(world, topic, of); };
  auto& store = *world.meeting.store;
  store_set(store, key(rank), own);
  std::vector<std::string> keys;
  for (size_t other = 0; other < world_ranks.size(); ++other) keys.push_back(key(other));
  const auto deadline = SteadyClock::now() + limit;
  for (int attempt = 0; !store.check(keys); ++attempt) {
    if (world.watch && world.watch->raised()) throw CommError(world.watch->why());
    if (attempt % 100 == 99) {
      if (const auto fault = world.liveness->check(world_ranks)) throw CommError(fault->text);
      if (world.options.while_waiting) world.options.while_waiting();
    }
    const auto absent = [&] {
      std::vector<int> late;
      for (size_t other = 0; other < keys.size(); ++other) {
        if (!store.check({keys[other]})) late.push_back(world_ranks[other]);
      }
      return late;
    };
    if (attempt % 500 == 499 && !world.watch && world.meeting.launcher) {  // of another host only a launcher can tell
      const auto launcher = world.meeting.launcher();
      for (const int late : absent()) {
        if (!launcher->check({ended_key(world.placement.generation, late)})) continue;
        throw CommError(fmt::format("rank {} has ended, as its launcher says, before it reached {}", late, topic),
                        late);
      }
    }
    if (SteadyClock::now() > deadline) {
      const auto late = absent();
      if (late.empty()) continue;  // it has come just now
      throw CommError(
          fmt::format("not all ranks reached {} within {} s: rank {} has not made this group, which each of its "
                      "ranks must, with the same ranks (in Python, every rank calls new_group())",
                      topic, std::chrono::duration<double>(limit).count(), fmt::join(late, ", ")));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  std::vector<std::string> lines;
  for (const auto& value : store.multiGet(keys)) lines.emplace_back(value.begin(), value.end());
  return lines;
}

}  // namespace shoal
