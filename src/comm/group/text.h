#pragma once
// Collectives of text, for rare use. Each rank's text may have any length, zero included.

#include <string>
#include <vector>

#include "shoal/group.h"

namespace shoal {

// Returns the texts by rank, on every rank.
std::vector<std::string> all_gather_text(const Group& group, const std::string& text, const Label& label);
// Returns the texts by rank on `root`, nothing elsewhere. The root allocates ranks times the longest text.
std::vector<std::string> gather_text(const Group& group, const std::string& text, int root, const Label& label);
// Returns the root's text on every rank.
std::string broadcast_text(const Group& group, const std::string& text, int root, const Label& label);

}  // namespace shoal
