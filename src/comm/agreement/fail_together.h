#pragma once
// Failures of communication that all ranks of a group report together.

#include <functional>
#include <string>

#include "shoal/group.h"

namespace shoal {

// Calls `work`. Where it throws CommError on any rank, it is a CommError on all ranks of the group; `elsewhere` is the
// error of those whose own call ended well. Collective.
void fail_together(const Group& group, const Label& label, const std::string& elsewhere,
                   const std::function<void()>& work);

}  // namespace shoal
