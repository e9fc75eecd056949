#pragma once
// Prediction of memory and communication of a training run of a built-in model.

#include <cstdint>
#include <string>
#include <vector>

#include "cli/train/train_options.h"
#include "models/model.h"

namespace shoal::cli {

// What one rank gives to the group, as GroupStatistics counts it.
struct PlannedCalls {
  int64_t calls = 0;
  int64_t bytes = 0;

  void add(int64_t call_bytes) {
    ++calls;
    bytes += call_bytes;
  }
};

// Bytes.
struct RankMemory {
  int64_t parameters = 0;
  int64_t gradients = 0;  // at the end of a step
  int64_t state = 0;      // of the optimizer, float32 main copies included
  int64_t buffers = 0;

  int64_t total() const { return parameters + gradients + state + buffers; }
};

struct ModelPlan {
  std::vector<RankMemory> ranks;
  bool parameters_once = false;  // the ranks of the host share one copy of the parameters
  bool gathers = false;          // parameters are gathered unit by unit when they are used, which is not counted here
  PlannedCalls first_step;       // its buckets follow the order of registration
  PlannedCalls rebuild;          // between the first and the second step: the order in which gradients arrive
  int64_t plain_steps = 0;       // before a communication hook starts to compress
  PlannedCalls plain_step;       // every further one of these
  PlannedCalls per_step;         // every further one, unless a scaler skips it
};

// options: completed, for one of the strategies ddp, zero1, zero2, megatron, fsdp. model: made for them, in the
// parameters' dtype. Runs the model's forward and backward once, on one sample, since buckets follow the order of
// gradients.
ModelPlan plan_model(const TrainOptions& options, models::Model& model, int ranks);

}  // namespace shoal::cli
