#pragma once
// The bench's figures for people.

#include <nlohmann/json.hpp>
#include <string>

namespace shoal::cli {

// One line per figure; the peers' figures as ratios to the host transport's.
std::string collectives_table(const nlohmann::ordered_json& figures);

std::string training_table(const nlohmann::ordered_json& figures);

}  // namespace shoal::cli
