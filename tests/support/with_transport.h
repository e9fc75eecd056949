#pragma once
// Group whose calls a test observes, counts or corrupts.

#include <functional>
#include <memory>

#include "comm/group/group_state.h"

namespace shoal::test {

// The same group; calls through the returned handle go to `wrap(its transport)`.
inline Group with_transport(const Group& group,
                            const std::function<std::shared_ptr<Transport>(std::shared_ptr<Transport>)>& wrap) {
  auto copy = std::make_shared<GroupState>(*state_of(group));
  copy->transport = wrap(copy->transport);
  return Group(std::move(copy));
}

}  // namespace shoal::test
