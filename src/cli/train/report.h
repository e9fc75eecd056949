#pragma once
// Report of a training run, in the format of the reference peers.

#include <nlohmann/json.hpp>
#include <vector>

#include "cli/train/train_options.h"
#include "cli/train/trainer.h"

namespace shoal::cli {

struct MemoryUse {
  double before = 0;  // MiB resident before the model was made
  double peak = 0;    // maximum since then
  double pss = 0;     // proportional set size at the end of training
};

// Digests of each rank's parameters, for strategies whose ranks train models of their own. Collective over `present`,
// the remaining ranks; the result is the same on all of them, as below.
nlohmann::ordered_json digests_of_ranks(const Group& present, const models::Model& model);

// Gathers values that differ between ranks. params_per_rank: result of digests_of_ranks() before `model` held the
// ranks' mean; null if their models are equal. Collective over `present`.
nlohmann::ordered_json make_report(const TrainOptions& options, const World& world, const Group& present,
                                   models::Model& model, const TrainResult& result, const MemoryUse& memory,
                                   const nlohmann::ordered_json& params_per_rank);

// Writes to a file, or to standard output for "-". UsageError names the file.
void write_json(const std::string& path, const nlohmann::ordered_json& json);

// Removes the report of an earlier run; what is no regular file stays.
void remove_report(const std::string& path);

// UsageError names the file.
void write_text(const std::string& path, const std::string& text);

// Parameters and buffers by name; a shared tensor once.
std::vector<std::pair<std::string, at::Tensor>> named_state(const torch::nn::Module& module);

}  // namespace shoal::cli
