#pragma once
// Check of what a user's function returns as a loss.

#include <fmt/format.h>
#include <torch/types.h>

#include <sstream>
#include <string>

#include "shoal/error.h"

namespace shoal {

// UsageError, in the name of the function `of`, for a loss that backward() would refuse.
inline void require_one_number(const std::string& of, const at::Tensor& loss) {
  std::ostringstream shape;
  if (loss.defined()) shape << "a tensor of shape " << loss.sizes();
  if (!loss.defined() || loss.numel() != 1) {
    throw UsageError(fmt::format("{}: the loss is {}; return one number, such as the mean over the samples", of,
                                 loss.defined() ? shape.str() : "no tensor"));
  }
  if (!loss.requires_grad()) {
    throw UsageError(
        fmt::format("{}: the loss has no gradient; compute it from the module's output, without NoGradGuard and "
                    "detach()",
                    of));
  }
}

}  // namespace shoal
