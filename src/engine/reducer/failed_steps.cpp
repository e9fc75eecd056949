#include "engine/reducer/failed_steps.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <mutex>
#include <thread>
#include <vector>

namespace shoal {
namespace {

struct Entry {
  FailedStep* step;
  int backward;
  std::thread::id thread;
};

// Several threads may train, each with its own groups of ranks.
struct FailedSteps {
  std::mutex mutex;
  std::vector<Entry> all;

  std::vector<Entry> those(const std::function<bool(const Entry&)>& chosen) {
    const std::lock_guard lock(mutex);
    std::vector<Entry> list;
    std::copy_if(all.begin(), all.end(), std::back_inserter(list), chosen);
    return list;
  }
};

FailedSteps& failed_steps() {
  static auto* one = new FailedSteps;  // never destroyed: reducers may outlive static objects
  return *one;
}

}  // namespace

void note_failed(FailedStep& step, int backward) {
  auto& [mutex, all] = failed_steps();
  const std::lock_guard lock(mutex);
  const bool noted = std::any_of(all.begin(), all.end(), [&](const Entry& entry) { return entry.step == &step; });
  if (!noted) all.push_back({&step, backward, std::this_thread::get_id()});
}

void forget_failed(FailedStep& step) {
  auto& [mutex, all] = failed_steps();
  const std::lock_guard lock(mutex);
  std::erase_if(all, [&](const Entry& entry) { return entry.step == &step; });
}

void end_failed_step(FailedStep& step) {
  const auto own = failed_steps().those([&](const Entry& entry) { return entry.step == &step; });
  if (own.empty()) return;  // it has ended with another one
  const auto together = failed_steps().those([&](const Entry& entry) {
    return entry.step == &step || (entry.backward != no_backward && entry.backward == own.front().backward);
  });
  for (const auto& entry : together) entry.step->send_rest();
  for (const auto& entry : together) entry.step->end();
}

void end_failed_steps() {
  const auto here = std::this_thread::get_id();
  for (const auto& entry : failed_steps().those([&](const Entry& one) { return one.thread == here; })) {
    end_failed_step(*entry.step);
  }
}

}  // namespace shoal
