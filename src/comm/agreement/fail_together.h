#pragma once
// Failures of communication that all ranks of a group report together.

#include <functional>
#include <string>

#include "shoal/group.h"

namespace shoal {

// Calls `work`. If it throws CommError on any rank, all ranks of the group throw CommError; `elsewhere` is the text for
// ranks whose own call succeeded. Collective.
void fail_together(const Group& group, const Label& label, const std::string& elsewhere,
                   const std::function<void()>& work);

}  // namespace shoal
