#pragma once
// Checkpoints of an earlier run in the folder of --save.

#include <cstdint>
#include <optional>
#include <string>

namespace shoal::cli {

// The step of the checkpoint that `latest` names; nothing if there is none.
std::optional<int64_t> latest_step(const std::string& save);
// Lets `latest` name the checkpoint of that step again. False if that is not possible.
bool name_latest_again(const std::string& save, int64_t step);

}  // namespace shoal::cli
