#pragma once
// Steps of a collective over several hosts.

#include <deque>
#include <functional>
#include <vector>

#include "comm/hierarchical/host_grid.h"
#include "shoal/detail/call.h"

namespace shoal {

// up, down: the ranks of this host, before and after the network; across: the ranks at one place of every host; flat:
// all ranks.
enum class Channel { up, across, down, flat };

// A step of an operation: one or several calls on one channel, then some arithmetic.
struct Stage {
  Channel channel;
  std::vector<Call> calls;
  std::function<void()> then;
};

// The stages of a collective for the rank that `grid` was made for; see hierarchical.h for what they send. Calls
// without data are among them.
std::deque<Stage> plan_stages(const HostGrid& grid, const Call& call);

}  // namespace shoal
