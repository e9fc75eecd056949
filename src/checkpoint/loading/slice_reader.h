#pragma once
// Reader of named tensors from a source of slices: any part, in another order of dimensions, and into another dtype.

#include <torch/types.h>

#include <memory>
#include <string>
#include <vector>

#include "checkpoint/loading/slice_source.h"

namespace shoal {

struct ReadOptions {
  std::vector<int64_t> order{};  // order of dimensions in which `range` counts elements; see NamedSlice
  bool convert = false;          // converts to the destination's dtype
};

// UsageError for a tensor that does not exist, a range beyond it, or a destination of another size or dtype; the source
// has errors of its own. Memory: pieces of 1 MiB while reading. One thread at a time.
class SliceReader {
 public:
  explicit SliceReader(std::shared_ptr<SliceSource> source);

  // For errors.
  std::string name() const { return source_->name(); }
  // Names, shapes, dtypes and state.
  const CheckpointIndex& index() const { return source_->index(); }
  const StoredTensor& tensor(const std::string& name) const;
  // Whether there is such a tensor in that part: a model's may have any name.
  bool has(const std::string& name, const std::string& part) const;

  // destination <- the elements `range` of the tensor. The destination has range.size() elements of any shape, strides
  // and device, and is filled in row-major order of its shape.
  void read(const std::string& name, const Range& range, const at::Tensor& destination,
            const ReadOptions& options = {}) const;
  // The whole tensor, in its own dtype.
  at::Tensor read(const std::string& name) const;

 private:
  void read_in_order(const StoredTensor& tensor, const Range& range, const std::vector<int64_t>& order, char* to) const;

  std::shared_ptr<SliceSource> source_;
};

}  // namespace shoal
