#pragma once
// Named timers of the parts of a step (after Megatron-LM's).

#include <chrono>
#include <cstdint>
#include <iosfwd>
#include <mutex>
#include <string>
#include <vector>

#include "shoal/comm/group.h"

namespace shoal {

struct TimersOptions {
  int level = 0;         // 0: whole steps; 1: also their collectives; 2: also what a rank does alone
  bool barrier = false;  // a part begins when all ranks have come to it, so that waiting for a late one is not counted
                         // as the part's own time. Costs a barrier for each part, and hides what overlap gains

  // Throws UsageError.
  void validate() const;
};

// What one timer has measured on this rank.
struct Timing {
  std::string name;
  int64_t count = 0;
  double total_s = 0;
  double max_s = 0;
};

// Give one to a strategy's options, and measure parts of your own with it:
//
//   auto timers = std::make_shared<shoal::Timers>(shoal::TimersOptions{.level = 2});
//   ...
//   timers->measure("forward-backward", 0, [&] { train_step(); });
//   std::cout << *timers;
//
// With `barrier`, options and calls must be the same on all ranks. Thread-safe.
class Timers {
 public:
  explicit Timers(const TimersOptions& options = {});

  // Calls act() and measures it, unless `level` is above the options'. What throws is not counted. `meet`: the ranks
  // that do this part together, for `barrier`; nullptr for a part that has no common beginning. Collective with both.
  template <class Act>
  void measure(const std::string& name, int level, const Act& act, const Group* meet = nullptr) {
    if (level > options_.level) return act();
    if (options_.barrier && meet != nullptr) meet->barrier({-1, -1, "before " + name}).wait();
    const auto start = Clock::now();
    act();
    add(name, std::chrono::duration<double>(Clock::now() - start).count());
  }

  // In the order in which the names first came.
  std::vector<Timing> result() const;
  void reset();

 private:
  void add(const std::string& name, double seconds);

  const TimersOptions options_;
  mutable std::mutex mutex_;
  std::vector<Timing> timings_;
};

// A table: name, count, total and longest in milliseconds.
std::ostream& operator<<(std::ostream& out, const Timers& timers);

// Timers::measure where there are timers; without, nothing but act().
template <class Act>
void timed(Timers* timers, const char* name, int level, const Act& act, const Group* meet = nullptr) {
  timers == nullptr ? act() : timers->measure(name, level, act, meet);
}

}  // namespace shoal
