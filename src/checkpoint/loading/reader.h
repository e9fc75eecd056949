#pragma once
// Reading checkpoints: any rank any part, whatever strategy and number of ranks wrote them.

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/format/index.h"
#include "shoal/group.h"

namespace shoal {

struct ReadOptions {
  std::vector<int64_t> order{};  // in which `range` counts; see NamedSlice
  bool convert = false;          // to the destination's dtype where it is another
};

// An open checkpoint, safetensors file, or folder of Hugging Face's with model.safetensors or its sharded form. Trusts
// no byte: what departs from the format or does not match its checksum is a CheckpointError that names file and reason.
// UsageError: a tensor that is not there, a range beyond it, a destination of another size or dtype.
//
// Memory: the index; while reading, pieces of 1 MiB. Reads from the files what is asked for, and for checksums up to 1
// MiB around it. One thread at a time. Not collective.
class CheckpointReader {
 public:
  // path: as find_checkpoint() takes it. verify: compares checksums when bytes are first read.
  explicit CheckpointReader(const std::filesystem::path& path, bool verify = true);
  ~CheckpointReader();
  CheckpointReader(CheckpointReader&&) noexcept;

  // The folder or file that was found.
  const std::filesystem::path& path() const;
  // Names, shapes, dtypes, state. Where other programs wrote it: step 0, no state, one rank.
  const CheckpointIndex& index() const;
  const StoredTensor& tensor(const std::string& name) const;

  // destination <- the elements `range` of the tensor. destination: range.size() elements of any shape, filled in
  // row-major order of that shape, whatever its strides and device.
  void read(const std::string& name, const Range& range, const at::Tensor& destination,
            const ReadOptions& options = {}) const;
  // The whole, in its own dtype.
  at::Tensor read(const std::string& name) const;

  struct Verified {
    int64_t bytes = 0;      // of all tensors
    int64_t unchecked = 0;  // of those without checksums
  };
  // Reads everything, whatever it was opened with.
  Verified verify() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// The same checkpoint on every rank, although `latest` may change at any time: rank 0 looks it up. Collective; errors
// on every rank.
CheckpointReader open_checkpoint(const Group& group, const std::filesystem::path& path, bool verify = true);

}  // namespace shoal
