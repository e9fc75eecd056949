#include "engine/reducer/failed_steps.h"

#include <algorithm>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace shoal {
namespace {

// Several threads may train, each with its own groups of ranks.
struct FailedSteps {
  std::mutex mutex;
  std::vector<std::pair<FailedStep*, std::thread::id>> all;
};

FailedSteps& failed_steps() {
  static auto* one = new FailedSteps;  // never destroyed: reducers may outlive static objects
  return *one;
}

}  // namespace

void note_failed(FailedStep& step) {
  auto& [mutex, all] = failed_steps();
  const std::lock_guard lock(mutex);
  const bool noted = std::any_of(all.begin(), all.end(), [&](const auto& entry) { return entry.first == &step; });
  if (!noted) all.emplace_back(&step, std::this_thread::get_id());
}

void forget_failed(FailedStep& step) {
  auto& [mutex, all] = failed_steps();
  const std::lock_guard lock(mutex);
  std::erase_if(all, [&](const auto& entry) { return entry.first == &step; });
}

void end_failed_steps() {
  std::vector<FailedStep*> own;
  {
    auto& [mutex, all] = failed_steps();
    const std::lock_guard lock(mutex);
    for (const auto& [step, thread] : all) {
      if (thread == std::this_thread::get_id()) own.push_back(step);
    }
  }
  for (auto* step : own) step->send_rest();
  for (auto* step : own) step->end();
}

}  // namespace shoal
