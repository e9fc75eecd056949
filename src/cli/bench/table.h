#pragma once
// The bench's figures for people.

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace shoal::cli {

// The transports of these figures that are not shoal's own, for comparison with them.
std::vector<std::string> compared_with(const nlohmann::ordered_json& figures);
// The median of the same operation over `transport` divided by this figure's; null where it was not measured.
nlohmann::ordered_json times_faster(const nlohmann::ordered_json& figures, const nlohmann::ordered_json& figure,
                                    const std::string& transport);

// One line per figure.
std::string collectives_table(const nlohmann::ordered_json& figures);

std::string training_table(const nlohmann::ordered_json& figures);

}  // namespace shoal::cli
