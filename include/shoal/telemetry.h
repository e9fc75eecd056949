#pragma once
// Telemetry: timelines, timers of the parts of a step, and logging data of wrappers.

#include <chrono>
#include <cstdint>
#include <iosfwd>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "shoal/call_log.h"
#include "shoal/group.h"

namespace shoal {

// Time span in a timeline. Categories:
//   compute     forward, backward, ... of a thread; they nest and do not overlap otherwise
//   wait        a thread waits for a collective; nests like compute
//   collective  from the call until this rank knows that it has finished
//   exchange    arrival of a neighbour's values over a socket in decentralised training, from the first byte to the
//               last; the label's step is the one that averages them
//   unit        the moment when an operator first uses a unit's parameters, where FullyShardedDataParallel gathers them
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

// List of spans in memory, for WorldOptions::timeline. Grows by about 200 bytes per span, without bound. Each rank has
// its own. Thread-safe.
class Timeline {
 public:
  void add(Span span);
  std::vector<Span> spans() const;  // in order of their ends

 private:
  mutable std::mutex mutex_;
  std::vector<Span> spans_;
};

// Timeline of the group's world; nullptr if tracing is off.
Timeline* timeline_of(const Group& group);

// Scope that adds a span of category "compute" when it ends, also by an exception. Does nothing without a timeline.
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

// Offset to add to this rank's Clock to get the clock of the group's rank 0, accurate to half of the shortest of
// several round trips. Exactly 0 if 0 is within that accuracy, so that ranks on one host, which share a clock, keep it.
// Collective.
Clock::duration clock_offset(const Group& group);

struct TimersOptions {
  int level = 0;  // 0: whole steps; 1: also their collectives; 2: also local work
  // Put a barrier before each part, so that waiting for a late rank is not counted as the part's time. Costs a barrier
  // per part and hides the gain of overlap.
  bool barrier = false;

  // Throws UsageError.
  void validate() const;
};

// Measurements of one timer on this rank.
struct Timing {
  std::string name;
  int64_t count = 0;
  double total_s = 0;
  double max_s = 0;
};

// Named timers of the parts of a step, after Megatron-LM's. Pass them to a strategy's options, and measure parts of
// your own:
//
//   auto timers = std::make_shared<shoal::Timers>(shoal::TimersOptions{.level = 2});
//   ...
//   timers->measure("forward-backward", 0, [&] { train_step(); });
//   std::cout << *timers;
//
// With `barrier`, options and calls must be the same on all ranks; DistributedOptimizer compares the options.
// Thread-safe.
class Timers {
 public:
  explicit Timers(const TimersOptions& options = {});
  const TimersOptions& options() const { return options_; }

  // Calls act() and measures it, unless `level` is above the level of the options. Calls that throw are not counted.
  // `meet`: the ranks that run this part together, for `barrier`; nullptr for a part without a common beginning.
  // Collective if both are set.
  template <class Act>
  void measure(const std::string& name, int level, const Act& act, const Group* meet = nullptr) {
    if (level > options_.level) return act();
    if (options_.barrier && meet != nullptr) meet->barrier({-1, -1, "before " + name}).wait();
    const auto start = Clock::now();
    act();
    add(name, std::chrono::duration<double>(Clock::now() - start).count());
  }

  // Measurements in the order in which the names first occurred.
  std::vector<Timing> result() const;
  void reset();

 private:
  void add(const std::string& name, double seconds);

  const TimersOptions options_;
  mutable std::mutex mutex_;
  std::vector<Timing> timings_;
};

// Prints a table of name, count, total and maximum in milliseconds.
std::ostream& operator<<(std::ostream& out, const Timers& timers);

// Calls Timers::measure, or only act() if `timers` is nullptr.
template <class Act>
void timed(Timers* timers, const char* name, int level, const Act& act, const Group* meet = nullptr) {
  timers == nullptr ? act() : timers->measure(name, level, act, meet);
}

// True if times of this step are measured: the first ten, then every hundredth.
constexpr bool is_sampled(int64_t step) {
  return step < 10 || step % 100 == 0;
}

// Times of a step on this rank in milliseconds; with micro-batches, of the one that synchronises.
struct StepTimes {
  double forward = 0;   // forward of the module; 0 if it is not called through a wrapper
  double backward = 0;  // from the first gradient to the last, without the wait for reductions; 0 without a backward
  // From the start of the first bucket's reduction to the end of the last. Decentralised: from the first average of a
  // bucket to the last published bucket, including updates between them.
  double communication = 0;
  double overlap = 0;  // part of `communication` that overlaps with backward
};

struct LoggingData {
  using Settings = std::vector<std::pair<std::string, std::string>>;

  // Options of the wrapper, fixed at construction.
  std::string strategy;  // class of the wrapper
  std::string module;    // class of the module
  std::string group;
  std::string transport;
  int rank = 0;  // within the group
  int world_size = 1;
  std::string device;
  std::vector<std::string> dtypes;  // distinct dtypes of the parameters
  // Number and size of tensors, each counted once, without ignored ones.
  int64_t trainable_tensors = 0;
  int64_t trainable_bytes = 0;
  int64_t frozen_tensors = 0;
  int64_t frozen_bytes = 0;
  int64_t buffer_tensors = 0;
  int64_t buffer_bytes = 0;
  std::string communication_hook;  // name of the hook; empty: none
  Settings settings;               // the wrapper's options
  Settings environment;            // environment variables that affect launch and transports, if set

  // Bytes of gradients per bucket, including alignment, in the order in which buckets are reduced, without the metadata
  // appended to them. 0: a sparse gradient, whose size varies. Decentralised: bytes of parameters, known after the
  // first step.
  std::vector<int64_t> first_bucket_bytes;  // in the first step
  std::vector<int64_t> bucket_bytes;        // now
  bool rebuilt = false;                     // buckets were rebuilt in the order in which gradients are computed

  // Statistics so far.
  int64_t steps = 0;                           // including abandoned ones
  std::vector<std::string> unused_parameters;  // parameters that no rank (decentralised: this rank) used in the last
                                               // step
  int64_t unused_bytes = 0;
  int64_t sampled_steps = 0;
  StepTimes last;  // last measured step
  StepTimes mean;  // mean over measured steps
};

// Formats the data as one line per field.
std::string to_table(const LoggingData& data);
// Formats the data as a JSON object; times in milliseconds.
std::string to_json(const LoggingData& data);

}  // namespace shoal
