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
  std::optional<BackwardPlace> where;
  std::thread::id thread;

  bool of_backward(int number) const { return where && where->backward == number; }
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
  std::optional<Entry> find(const FailedStep* step) {
    const auto found = those([&](const Entry& entry) { return entry.step == step; });
    return found.empty() ? std::nullopt : std::optional(found.front());
  }
};

FailedSteps& failed_steps() {
  static auto* one = new FailedSteps;  // never destroyed: reducers may outlive static objects
  return *one;
}

// Does nothing if it has ended with another one.
void end_together(FailedStep* step) {
  const auto own = failed_steps().find(step);
  if (!own) return;
  auto together = failed_steps().those([&](const Entry& entry) {
    return entry.step == step || (own->where && entry.of_backward(own->where->backward));
  });
  std::sort(together.begin(), together.end(), [](const Entry& one, const Entry& other) {
    return one.where && other.where && one.where->order < other.where->order;
  });
  for (const auto& entry : together) entry.step->send_rest();
  for (const auto& entry : together) {
    if (failed_steps().find(entry.step)) entry.step->end();
  }
}

}  // namespace

void note_failed(FailedStep& step, const std::optional<BackwardPlace>& where) {
  const auto former = failed_steps().find(&step);
  if (former && (!where || former->of_backward(where->backward))) return;
  forget_failed(step);
  auto& [mutex, all] = failed_steps();
  const std::lock_guard lock(mutex);
  all.push_back({&step, where, std::this_thread::get_id()});
}

void forget_failed(FailedStep& step) {
  auto& [mutex, all] = failed_steps();
  const std::lock_guard lock(mutex);
  std::erase_if(all, [&](const Entry& entry) { return entry.step == &step; });
}

void end_failed_step(FailedStep& step) {
  const auto own = failed_steps().find(&step);
  if (!own) return;
  const auto here = std::this_thread::get_id();
  const auto earlier = failed_steps().those([&](const Entry& entry) {
    return entry.thread == here && entry.where && (!own->where || entry.where->backward < own->where->backward);
  });
  for (const auto& entry : earlier) end_together(entry.step);
  end_together(&step);
}

void end_failed_steps() {
  const auto here = std::this_thread::get_id();
  for (const auto& entry : failed_steps().those([&](const Entry& one) { return one.thread == here; })) {
    end_together(entry.step);
  }
}

}  // namespace shoal
