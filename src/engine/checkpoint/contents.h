#pragma once
// A training as named slices.

#include <vector>

#include "checkpoint/saving/saver.h"
#include "engine/checkpoint/schedule.h"
#include "engine/checkpoint/source.h"

namespace shoal {

// What belongs to a training beside its strategy.
struct Companions {
  GradScaler* scaler = nullptr;
  std::vector<Schedule> schedules{};
};

// What this rank gives. Tensors are the training's own, so that a save copies them or has to end before they change.
// Collective where ranks have parameters of their own.
CheckpointContents contents_of(CheckpointSource& source, const Group& group, const Companions& companions,
                               const SaveOptions& options);

// Whose random numbers belong to it: the CPU, and the device on which the model is.
std::vector<at::Device> devices_of(const CheckpointView& view);
std::string random_name(const at::Device& device);

}  // namespace shoal
