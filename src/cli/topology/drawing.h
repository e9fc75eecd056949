#pragma once
// Drawings of topologies.

#include <string>

#include "shoal/topology.h"

namespace shoal::cli {

// SVG document with the first rounds: the ranks on a circle, with lines from sender to receiver, wider for larger
// weights, and arrows for one-way edges. With too many ranks for that, the matrices.
std::string rounds_drawing(const Topology& topology);

// SVG plot of TopologyReport::distance over steps, logarithmic.
std::string distance_drawing(const TopologyReport& report);

// HTML page with both drawings and the report.
std::string topology_page(const Topology& topology, const TopologyReport& report);

}  // namespace shoal::cli
