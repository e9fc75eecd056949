#pragma once
// What a wrapper says about itself and about how its steps went, on this rank. After PyTorch's DDPLoggingData.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace shoal {

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
