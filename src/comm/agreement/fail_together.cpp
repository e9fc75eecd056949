#include "comm/agreement/fail_together.h"

#include <optional>

#include "shoal/error.h"

namespace shoal {

void fail_together(const Group& group, const Label& label, const std::string& elsewhere,
                   const std::function<void()>& work) {
  std::optional<CommError> failure;
  try {
    work();
  } catch (const CommError& error) {
    failure = error;
  }
  auto failed = at::full({1}, failure ? 1 : 0, at::kInt);
  group.all_reduce(failed, ReduceOp::max, label).wait();
  if (failure) throw *failure;
  if (failed.item<int>() != 0) throw CommError(elsewhere);
}

}  // namespace shoal
