#pragma once
// Contents of a checkpoint of a training: named slices and state.

#include <vector>

#include "checkpoint/saving/saver.h"
#include "engine/checkpoint/schedule.h"
#include "engine/checkpoint/source.h"

namespace shoal {

// Parts of a training beside its strategy.
struct Companions {
  GradScaler* scaler = nullptr;
  std::vector<Schedule> schedules{};
};

// This rank's part of the checkpoint. Its tensors are the training's own, so that a save has to copy them or end before
// they change. Collective for trainings whose ranks may have values of their own.
CheckpointContents contents_of(CheckpointSource& source, const Group& group, const Companions& companions,
                               const SaveOptions& options);

// What SaveOptions::position is in a rank's state, and back. CheckpointError for what is neither text nor bytes.
nlohmann::json stored_position(const std::string& position);
std::string read_position(const nlohmann::json& stored);

// Devices whose random number generators belong to the training: the CPU and the model's device.
std::vector<at::Device> devices_of(const CheckpointView& view);
std::string random_name(const at::Device& device);

}  // namespace shoal
