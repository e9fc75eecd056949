#include "cli/meeting.h"

#include <chrono>
#include <string>
#include <thread>

#include "shoal/base/error.h"

namespace shoal::cli {

using Clock = std::chrono::steady_clock;

Meeting::Outcome Meeting::meet(int64_t steps, bool due, bool stops) {
  if (strategy_.in_step()) return stops ? Outcome::stop : due ? Outcome::together : Outcome::go_on;
  if (steps < appointed_) return Outcome::go_on;
  if (!due && !stops && steps != appointed_) return Outcome::go_on;
  while (true) {
    int64_t furthest = steps;
    int64_t least = steps;
    together([&](const Group& present) {
      const auto standing = at::tensor({steps, -steps, static_cast<int64_t>(stops)}, at::kLong);
      present.all_reduce(standing, ReduceOp::max, {-1, -1, "where ranks stand"}).wait();
      furthest = standing[0].item<int64_t>();
      least = -standing[1].item<int64_t>();
      stops = standing[2].item<int64_t>() != 0;
    });
    if (steps < furthest) {
      appointed_ = furthest;
      return Outcome::go_on;
    }
    if (least < furthest) continue;  // the others come
    appointed_ = -1;
    return stops ? Outcome::stop : Outcome::together;
  }
}

void Meeting::together(const std::function<void(const Group&)>& work) {
  constexpr std::chrono::seconds to_notice(3);  // who has ended
  auto deadline = Clock::time_point::max();
  std::string tried;
  while (true) {
    try {
      const auto present = strategy_.present().value_or(group_);
      if (present.name() != tried) deadline = Clock::time_point::max();
      tried = present.name();
      return work(present);
    } catch (const CommError&) {
      if (strategy_.in_step() || Clock::now() > deadline) throw;
      if (deadline == Clock::time_point::max()) deadline = Clock::now() + to_notice;
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  }
}

}  // namespace shoal::cli
