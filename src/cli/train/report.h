#pragma once
// The report of a training run, in the shape of the reference peers'.

#include <nlohmann/json.hpp>
#include <vector>

#include "cli/train/train_options.h"
#include "cli/train/trainer.h"

namespace shoal::cli {

struct MemoryUse {
  double before = 0;  // MiB resident before the model was built
  double peak = 0;    // the most since then
  double pss = 0;     // proportional, at the end of training
};

// Digests of each rank's own parameters, for strategies whose ranks train models of their own. Collective over `present`,
// the ranks that are still there; the result is the same on all of them, as below.
nlohmann::ordered_json digests_of_ranks(const Group& present, const models::Model& model);

// Gathers what differs between ranks. params_per_rank: what digests_of_ranks() said before `model` held the ranks' mean;
// null where their models are equal. Collective over `present`.
nlohmann::ordered_json make_report(const TrainOptions& options, const World& world, const Group& present,
                                   models::Model& model, const TrainResult& result, const MemoryUse& memory,
                                   const nlohmann::ordered_json& params_per_rank);

// To a file, or to standard output for "-". Throws UsageError that names the file.
void write_json(const std::string& path, const nlohmann::ordered_json& json);

// Throws UsageError that names the file.
void write_text(const std::string& path, const std::string& text);

// Parameters and buffers by name, a shared tensor once.
std::vector<std::pair<std::string, at::Tensor>> named_state(const torch::nn::Module& module);

}  // namespace shoal::cli
