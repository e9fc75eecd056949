#pragma once
// Match of a checkpoint's tensors with those that a model needs.

#include <torch/types.h>

#include <optional>
#include <string>
#include <vector>

#include "checkpoint/loading/slice_reader.h"

namespace shoal {

struct WantedTensor {
  std::string name;
  std::vector<int64_t> shape;
  std::optional<at::ScalarType> dtype{};  // that its values can be converted to, floating-point ones from each other
  std::vector<std::string> aliases{};     // its further names here (tied weights)
};

// Lists are in alphabetical order.
struct Match {
  std::vector<std::string> matching;     // names
  std::vector<std::string> missing;      // wanted, but not in the checkpoint
  std::vector<std::string> extra;        // in the checkpoint, but not wanted
  std::vector<std::string> wrong_shape;  // or kind of values: "fc.weight is [10, 128], wanted is [12, 128]"

  bool exact() const { return missing.empty() && extra.empty() && wrong_shape.empty(); }
  // "missing: a, b; extra: c; ..."; long lists end with a count.
  std::string describe() const;
};

// Compares the tensors of one part of the checkpoint whose names begin with `prefix` with those that are wanted. An
// alias of a wanted tensor is not extra where its values equal those of the wanted one, which takes a read of both.
Match match(const SliceReader& reader, const std::vector<WantedTensor>& wanted, const std::string& part = "model",
            const std::string& prefix = "");

// The same; UsageError with all names unless the match is exact. partial (for fine-tuning): only if a shape is wrong or
// nothing matches; missing tensors keep their values, extra ones are not read.
Match require_match(const SliceReader& reader, const std::vector<WantedTensor>& wanted, bool partial,
                    const std::string& part = "model", const std::string& prefix = "");

}  // namespace shoal
