#pragma once
// Checks that ranks agree.

#include <string>
#include <vector>

#include "shoal/comm/group.h"

namespace shoal {

// Every rank passes its list of items, each one line of text (for a model: "fc.weight float32 [10, 128]"). Returns
// when all lists are equal; otherwise throws DisagreeError on every rank, which names the first item that differs
// (against rank 0) and both ranks. Collective. Costs one all-gather of 8 bytes when all agree.
// `subject` says what is compared: "parameters of the model".
void agree(const Group& group, const std::string& subject, const std::vector<std::string>& items);

}  // namespace shoal
