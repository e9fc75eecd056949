#pragma once
// Text tables of the bench's figures.

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace shoal::cli {

// Transports among these figures that are not shoal's own, for comparison.
std::vector<std::string> compared_with(const nlohmann::ordered_json& figures);
// Median of the same operation over `transport` divided by this figure's; null if it was not measured.
nlohmann::ordered_json times_faster(const nlohmann::ordered_json& figures, const nlohmann::ordered_json& figure,
                                    const std::string& transport);

// One line per figure.
std::string collectives_table(const nlohmann::ordered_json& figures);

}  // namespace shoal::cli
