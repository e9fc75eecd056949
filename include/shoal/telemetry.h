#pragma once
// What a run tells of itself: timelines, timers of the parts of a step, logging data.

#include <chrono>
#include <cstdint>
#include <iosfwd>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "shoal/detail/call_log.h"
#include "shoal/group.h"

namespace shoal {

// What a rank did when, for a trace.

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

// Named timers of the parts of a step (after Megatron-LM's).

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

// What a wrapper says about itself and about how its steps went, on this rank. After PyTorch's DDPLoggingData.

// Whether times are taken in a step of a wrapper: in the first ten, then in every hundredth.
constexpr bool is_sampled(int64_t step) {
  return step < 10 || step % 100 == 0;
}

// Milliseconds on this rank; of the micro-batch that synchronises, where a step has several.
struct StepTimes {
  double forward = 0;        // of the module; 0 where its own forward is called instead of a wrapper's
  double backward = 0;       // from the first gradient until the last one has been handed over; 0 without a backward
  double communication = 0;  // from the departure of the first bucket until all are back. Decentralised: from when the
                             // first bucket is mixed until the last one is shown, updates between them included
  double overlap = 0;        // of this, during backward
};

struct LoggingData {
  using Settings = std::vector<std::pair<std::string, std::string>>;

  // As constructed.
  std::string strategy;  // the wrapper's class
  std::string module;    // the module's
  std::string group;
  std::string transport;
  int rank = 0;  // within the group
  int world_size = 1;
  std::string device;
  std::vector<std::string> dtypes;  // of parameters, each once
  // Without what is ignored; each tensor once.
  int64_t trainable_tensors = 0;
  int64_t trainable_bytes = 0;
  int64_t frozen_tensors = 0;
  int64_t frozen_bytes = 0;
  int64_t buffer_tensors = 0;
  int64_t buffer_bytes = 0;
  std::string communication_hook;  // its name; empty: none
  Settings settings;               // the wrapper's options
  Settings environment;            // variables that matter to launch and transports, as far as they are set

  // Bytes of gradients in each bucket, alignment included, in the order in which buckets leave; what rides behind them
  // is not. 0: a sparse gradient, whose size differs from step to step. Decentralised: of parameters, from the end of
  // the first step on.
  std::vector<int64_t> first_bucket_bytes;  // in the first step
  std::vector<int64_t> bucket_bytes;        // now
  bool rebuilt = false;                     // in the order in which gradients arrive

  // So far.
  int64_t steps = 0;                           // finished or abandoned
  std::vector<std::string> unused_parameters;  // that no rank used in the last step; decentralised: not this one
  int64_t unused_bytes = 0;
  int64_t sampled_steps = 0;
  StepTimes last;  // sampled step
  StepTimes mean;  // over the sampled steps
};

// A line for each field.
std::string to_table(const LoggingData& data);
// One object; times in milliseconds.
std::string to_json(const LoggingData& data);

}  // namespace shoal
