#pragma once
// Stages of a collective over several hosts.

#include <deque>
#include <functional>
#include <vector>

#include "comm/hierarchical/host_grid.h"
#include "shoal/detail/call.h"

namespace shoal {

// up, down: ranks of this host, before and after the network; across: ranks at the same place on every host; flat: all
// ranks.
enum class Channel { up, across, down, flat };

// Stage of an operation: one or several calls on one channel, followed by arithmetic.
struct Stage {
  Channel channel;
  std::vector<Call> calls;
  std::function<void()> then;
};

// The stages of a collective for the rank that `grid` was made for; hierarchical.h says what they send. Includes calls
// without data.
std::deque<Stage> plan_stages(const HostGrid& grid, const Call& call);

}  // namespace shoal
