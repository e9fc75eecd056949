#pragma once
// Values that a program has loaded into parameters in place.

#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/changes/changed_values.h"

namespace shoal {

// Loads since the engine has last looked at the parameters. Those that together leave the values as they were do not
// count, such as averages that are swapped in and out for an evaluation.
class Loads {
 public:
  // Before a load; without it, the load counts in any case.
  void begin(const std::vector<at::Tensor>& parameters) {
    if (!before_ && !loaded_) before_ = digests(parameters);
  }
  void end() { loaded_ = true; }
  bool changed(const std::vector<at::Tensor>& parameters) const {
    return loaded_ && (!before_ || *before_ != digests(parameters));
  }
  void clear() { *this = {}; }

 private:
  static std::vector<uint64_t> digests(const std::vector<at::Tensor>& parameters) {
    std::vector<uint64_t> list;
    for (const auto& parameter : parameters) list.push_back(digest_of(parameter));
    return list;
  }

  std::optional<std::vector<uint64_t>> before_{};
  bool loaded_ = false;
};

}  // namespace shoal
