#include "cli/train/meeting.h"

#include <chrono>
#include <string>
#include <thread>

#include "shoal/error.h"

namespace shoal::cli {

Meeting::Outcome Meeting::meet(int64_t steps, bool due, bool stops) {
  if (in_step()) return stops ? Outcome::stop : due ? Outcome::together : Outcome::go_on;
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
    if (least < furthest) continue;  // the other ranks come later
    appointed_ = -1;
    return stops ? Outcome::stop : Outcome::together;
  }
}

void Meeting::together(const std::function<void(const Group&)>& work) {
  // Retries for three seconds, until all ranks have noticed which one has ended. Counts attempts instead of time,
  // because ranks that share a model must try equally often.
  constexpr int most = 60;
  constexpr std::chrono::milliseconds pause(50);
  std::string tried;
  for (int attempt = 0;; ++attempt) {
    try {
      const auto present = training_.active_group().value_or(group_);
      if (present.name() != tried) attempt = 0;
      tried = present.name();
      return work(present);
    } catch (const CommError&) {
      if (in_step() || attempt == most) throw;
      std::this_thread::sleep_for(pause);
    }
  }
}

}  // namespace shoal::cli
