#pragma once
// Reader of checkpoints: any rank can read any part, whatever strategy and number of ranks wrote them.

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/format/index.h"
#include "shoal/group.h"

namespace shoal {

struct ReadOptions {
  std::vector<int64_t> order{};  // order of dimensions in which `range` counts elements; see NamedSlice
  bool convert = false;          // converts to the destination's dtype
};

// An open checkpoint, a safetensors file, or a Hugging Face folder with model.safetensors or its sharded form. Trusts
// no byte: a departure from the format or a wrong checksum is a CheckpointError that names file and reason. UsageError
// for a tensor that does not exist, a range beyond it, or a destination of another size or dtype.
//
// Memory: the index, and pieces of 1 MiB while reading. Reads the requested bytes and, for checksums, up to 1 MiB
// around them. One thread at a time. Not collective.
class CheckpointReader {
 public:
  // path: as for find_checkpoint(). verify: compare checksums when bytes are first read.
  explicit CheckpointReader(const std::filesystem::path& path, bool verify = true);
  ~CheckpointReader();
  CheckpointReader(CheckpointReader&&) noexcept;

  // The folder or file that was found.
  const std::filesystem::path& path() const;
  // Names, shapes, dtypes and state. For files of other programs: step 0, no state, one rank.
  const CheckpointIndex& index() const;
  const StoredTensor& tensor(const std::string& name) const;

  // destination <- the elements `range` of the tensor. The destination has range.size() elements of any shape, strides
  // and device, and is filled in row-major order of its shape.
  void read(const std::string& name, const Range& range, const at::Tensor& destination,
            const ReadOptions& options = {}) const;
  // The whole tensor, in its own dtype.
  at::Tensor read(const std::string& name) const;

  struct Verified {
    int64_t bytes = 0;      // of all tensors
    int64_t unchecked = 0;  // bytes of tensors without checksums
  };
  // Reads and checks everything, whatever `verify` was.
  Verified verify() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Opens the same checkpoint on every rank, although `latest` may change at any time: rank 0 resolves the path.
// Collective; throws on every rank.
CheckpointReader open_checkpoint(const Group& group, const std::filesystem::path& path, bool verify = true);

}  // namespace shoal
