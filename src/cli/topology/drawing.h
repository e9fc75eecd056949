#pragma once
// A topology as a picture.

#include <string>

#include "shoal/topology.h"

namespace shoal::cli {

// An SVG document: for each of the first rounds the ranks on a circle and who sends to whom, wider for larger weights,
// with arrows where it is one way; the matrix where there are too many ranks for that.
std::string rounds_drawing(const Topology& topology);

// An SVG plot of TopologyReport::distance over steps, logarithmic.
std::string distance_drawing(const TopologyReport& report);

// Both with the report, for people: a page.
std::string topology_page(const Topology& topology, const TopologyReport& report);

}  // namespace shoal::cli
