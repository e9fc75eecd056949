#pragma once
// Match of the tensors in a checkpoint with those that a model needs.

#include <torch/types.h>

#include <string>
#include <vector>

#include "checkpoint/loading/reader.h"

namespace shoal {

struct WantedTensor {
  std::string name;
  std::vector<int64_t> shape;
};

// Each list in alphabetical order.
struct Match {
  std::vector<std::string> matching;     // names
  std::vector<std::string> missing;      // wanted, and not there
  std::vector<std::string> extra;        // there, and not wanted
  std::vector<std::string> wrong_shape;  // "fc.weight is [10, 128], wanted is [12, 128]"

  bool exact() const { return missing.empty() && extra.empty() && wrong_shape.empty(); }
  // "missing: a, b; extra: c; ..."; long lists end in a number.
  std::string describe() const;
};

// Compares the tensors of one part of the checkpoint, those whose names begin with `prefix`, with what is wanted.
Match match(const CheckpointReader& reader, const std::vector<WantedTensor>& wanted, const std::string& part = "model",
            const std::string& prefix = "");

// The same, and UsageError with all names unless it is exact. partial: only where a shape is wrong, or nothing matches;
// what is missing keeps its values, what is extra is not read (fine-tuning).
Match require_match(const CheckpointReader& reader, const std::vector<WantedTensor>& wanted, bool partial,
                    const std::string& part = "model", const std::string& prefix = "");

}  // namespace shoal
