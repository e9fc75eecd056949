#pragma once
// What a rank did when, for a trace.

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "shoal/comm/call_log.h"
#include "shoal/comm/group.h"

namespace shoal {

// A stretch of time. Categories:
//   compute     forward, backward, ... of a thread: they nest and do not overlap otherwise
//   wait        a thread waits for a collective; like compute
//   collective  from the call to when this rank knew that it was finished
//   exchange    a neighbour's values in decentralised training arrive over a socket, from the first byte to the last;
//               the label's step is the one that mixes them
//   unit        the moment when an operator first takes a unit's parameters, as FullyShardedDataParallel gathers them
struct Span {
  std::string category;
  std::string name;
  std::string group;  // collective, wait, exchange
  Label label;
  int64_t bytes = 0;
  std::thread::id thread = std::this_thread::get_id();
  Clock::time_point begin;
  Clock::time_point end;
};

// Give it to WorldOptions. Grows by about 200 bytes per span, without bound. Thread-safe. In-process: every rank has
// its own.
class Timeline {
 public:
  void add(Span span);
  std::vector<Span> spans() const;  // in the order in which they ended

 private:
  mutable std::mutex mutex_;
  std::vector<Span> spans_;
};

// The world's, for any of its groups; nullptr: nothing is traced.
Timeline* timeline_of(const Group& group);

// Adds a span of category "compute" when it ends, however it ends. Without a timeline it does nothing.
class TimedScope {
 public:
  TimedScope(Timeline* timeline, const char* name, int64_t step = -1);
  ~TimedScope();
  TimedScope(const TimedScope&) = delete;
  TimedScope& operator=(const TimedScope&) = delete;

 private:
  Timeline* timeline_;
  const char* name_;
  int64_t step_;
  Clock::time_point begin_;
};

// What to add to this rank's Clock for that of the group's rank 0: the shortest of several round trips says it to half
// its time. Exactly 0 where 0 is within that, so that ranks of one host, which share a clock, keep it. Collective.
Clock::duration clock_offset(const Group& group);

}  // namespace shoal
