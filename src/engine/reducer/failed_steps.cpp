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

void end_failed_steps(const FailedStep* step) {
  std::vector<FailedStep*> failed;
  {
    auto& [mutex, all] = failed_steps();
    const std::lock_guard lock(mutex);
    const auto here = std::this_thread::get_id();
    const auto noted = std::find_if(all.begin(), all.end(), [&](const auto& entry) { return entry.first == step; });
    const auto there = noted == all.end() ? here : noted->second;
    for (const auto& [each, thread] : all) {
      if (thread == here || thread == there) failed.push_back(each);
    }
  }
  for (auto* each : failed) each->send_rest();
  for (auto* each : failed) each->end();
}

}  // namespace shoal
