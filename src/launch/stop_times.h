#pragma once
// Times at which ranks that do not end on their own are ended.

#include <optional>

#include "shoal/detail/clock.h"

namespace shoal {

class StopTimes {
 public:
  static Clock::duration seconds(double count);

  // Whether a time has been set.
  bool set() const { return term_at_.has_value(); }
  // The ranks have so many seconds, from now on; infinity: no limit.
  void give(double seconds);
  // The same, unless they have less already.
  void give_at_most(double seconds);
  // The signal for all ranks that is due: SIGTERM once, and SIGKILL from two seconds later on; 0: none.
  int due();

 private:
  std::optional<Clock::time_point> term_at_;
  std::optional<Clock::time_point> kill_at_;
};

}  // namespace shoal
