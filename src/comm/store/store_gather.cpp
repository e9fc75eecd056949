#include "comm/store/store_gather.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string_view>
#include <thread>

#include "base/printable.h"
#include "comm/rendezvous/world_state.h"
#include "comm/store/store_lost.h"
#include "shoal/detail/clock.h"
#include "shoal/error.h"

namespace shoal {

namespace {

// In place of the line of a rank that waits no longer. No line begins so.
constexpr std::string_view gave_up = "gave up ";

// So that ranks that come later do not take this one for present, and meet it where it tries again. It waits no longer
// than the store; without one there is nobody to tell.
void tell_later_ranks(c10d::Store& store, const std::string& key, const std::string& why) {
  try {
    store_set(store, key, std::string(gave_up) + why);
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): another error is being thrown
  }
}

// The store has ended with the process that held it, which may have been rank 0.
[[noreturn]] void throw_end_of_store(const WorldState& world, std::vector<int> world_ranks, const StoreLost& error) {
  world_ranks.push_back(0);
  for (const auto deadline = Clock::now() + std::chrono::seconds(1); Clock::now() < deadline;) {
    if (world.watch && world.watch->raised()) throw CommError(world.watch->why());
    if (const auto fault = world.liveness->check(world_ranks)) throw CommError(fault->text);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  throw error;
}

}  // namespace

std::string gathered_key(const WorldState& world, const std::string& topic, size_t of) {
  return fmt::format("{}/exchange/{}/{}", world.meeting.prefix, topic, of);
}

namespace {

std::vector<std::string> gather(const WorldState& world, const std::string& topic, const std::vector<int>& world_ranks,
                                int rank, const std::string& own, std::chrono::milliseconds limit) {
  const auto key = [&](size_t of) { return gathered_key(world, topic, of); };
  auto& store = *world.meeting.store;
  store_set(store, key(rank), own);
  std::vector<std::string> keys;
  for (size_t other = 0; other < world_ranks.size(); ++other) keys.push_back(key(other));
  const auto deadline = Clock::now() + limit;
  for (int attempt = 0; !store.check(keys); ++attempt) {
    if (world.watch && world.watch->raised()) throw CommError(world.watch->why());
    if (attempt % 100 == 99) {
      if (const auto fault = world.liveness->check(world_ranks)) throw CommError(fault->text);
      try {
        if (world.options.while_waiting) world.options.while_waiting();
      } catch (...) {
        tell_later_ranks(store, key(rank), "as it was interrupted");
        throw;
      }
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
    if (Clock::now() > deadline) {
      const auto late = absent();
      if (late.empty()) continue;  // it has come just now
      const auto seconds = std::chrono::duration<double>(limit).count();
      tell_later_ranks(store, key(rank), fmt::format("after {} s", seconds));
      throw CommError(
          fmt::format("not all ranks reached {} within {} s: rank {} has not made this group, which each of its "
                      "ranks must, with the same ranks (in Python, every rank calls new_group())",
                      topic, seconds, fmt::join(late, ", ")));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  std::vector<std::string> lines;
  for (const auto& value : store.multiGet(keys)) lines.emplace_back(value.begin(), value.end());
  for (size_t other = 0; other < lines.size(); ++other) {
    if (!lines[other].starts_with(gave_up)) continue;
    const auto why = lines[other].substr(gave_up.size());
    tell_later_ranks(store, key(rank), why);
    throw CommError(
        fmt::format("not all ranks are at {} any more: rank {} gave it up {}, before rank {} came; each rank may "
                    "make it again",
                    topic, world_ranks[other], printable(why), world_ranks[rank]),
        static_cast<int>(other));
  }
  return lines;
}

}  // namespace

std::vector<std::string> store_gather(const WorldState& world, const std::string& topic,
                                      const std::vector<int>& world_ranks, int rank, const std::string& own,
                                      std::chrono::milliseconds limit) {
  try {
    return gather(world, topic, world_ranks, rank, own, limit);
  } catch (const StoreLost& error) {
    throw_end_of_store(world, world_ranks, error);
  }
}

}  // namespace shoal
