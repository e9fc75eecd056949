#pragma once
// Prediction of a training run's memory and communication for a built-in model.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cli/train/train_options.h"
#include "models/model.h"

namespace shoal::cli {

// Communication of one rank, in the terms of GroupStatistics.
struct PlannedCalls {
  int64_t calls = 0;
  int64_t bytes = 0;

  void add(int64_t call_bytes) {
    ++calls;
    bytes += call_bytes;
  }
};

// Memory of one rank in bytes.
struct RankMemory {
  int64_t parameters = 0;
  int64_t gradients = 0;  // at the end of a step
  int64_t state = 0;      // of the optimizer, including float32 main copies
  int64_t buffers = 0;

  int64_t total() const { return parameters + gradients + state + buffers; }
};

struct ModelPlan {
  std::vector<RankMemory> ranks;
  bool parameters_once = false;  // the ranks of a host share one copy of the parameters
  bool gathers = false;          // parameters are gathered unit by unit when used; those gathers are not counted
  PlannedCalls first_step;       // buckets follow the order of registration
  PlannedCalls rebuild;          // between the first and the second step: agreement on the order of gradients
  int64_t plain_steps = 0;       // number of steps before a communication hook starts to compress
  PlannedCalls plain_step;       // each of these steps after the first
  PlannedCalls per_step;         // each step after those, unless a scaler skips it
};

// The model that plans are made for. What they have in common is found once, by the first one that needs it.
struct PlannedModel {
  std::shared_ptr<models::Model> model;
  std::vector<size_t> arrival{};  // the order in which backward delivers gradients; empty: not known yet
};

// options: completed, for one of the strategies ddp, zero1, zero2, megatron, fsdp. planned: made for them, in the
// parameters' dtype; its values do not matter. Runs the model's forward and backward on a short sample where buckets
// follow the order of gradients and it is not known yet.
ModelPlan plan_model(const TrainOptions& options, PlannedModel& planned, int ranks);

}  // namespace shoal::cli
