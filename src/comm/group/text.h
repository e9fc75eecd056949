#pragma once
// Text between ranks, for what happens seldom. Collective; each rank's may have any length, zero included.

#include <string>
#include <vector>

#include "shoal/group.h"

namespace shoal {

// By rank, on every rank.
std::vector<std::string> all_gather_text(const Group& group, const std::string& text, const Label& label);
// By rank on `root`; elsewhere nothing. Extra memory on the root: ranks times the longest text.
std::vector<std::string> gather_text(const Group& group, const std::string& text, int root, const Label& label);
// The root's, on every rank.
std::string broadcast_text(const Group& group, const std::string& text, int root, const Label& label);

}  // namespace shoal
