#pragma once
// Time that a wait sleeps before it looks again at what cannot wake it.

#include <algorithm>
#include <chrono>

namespace shoal {

// `least` at first, later a sixteenth of the time since then, at most 5 ms: a wait of seconds takes next to no
// processor time.
template <class Time>
Time time_between_looks(Time least, std::chrono::steady_clock::time_point since) {
  const auto waited = std::chrono::duration_cast<Time>(std::chrono::steady_clock::now() - since);
  return std::clamp<Time>(waited / 16, least, std::chrono::milliseconds(5));
}

}  // namespace shoal
