#pragma once
// A topology as text and as JSON.

#include <nlohmann/json.hpp>
#include <string>

#include "shoal/topology.h"

namespace shoal::cli {

// The rounds, with matrices where they are small, then the report.
std::string in_words(const Topology& topology, const TopologyReport& report);

// The report's lines: what, figure.
std::vector<std::pair<std::string, std::string>> report_lines(const TopologyReport& report);

// "file": what read_topology reads; "report": TopologyReport; and "name", "fingerprint".
nlohmann::ordered_json to_json(const Topology& topology, const TopologyReport& report);

}  // namespace shoal::cli
