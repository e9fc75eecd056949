#pragma once
// Topologies as text and as JSON.

#include <nlohmann/json.hpp>
#include <string>

#include "shoal/topology.h"

namespace shoal::cli {

// The rounds, with matrices if they are small, then the report.
std::string in_words(const Topology& topology, const TopologyReport& report);

// Lines of the report: label and value.
std::vector<std::pair<std::string, std::string>> report_lines(const TopologyReport& report);

// "file": the input of read_topology; "report": TopologyReport; also "name" and "fingerprint".
nlohmann::ordered_json to_json(const Topology& topology, const TopologyReport& report);

}  // namespace shoal::cli
