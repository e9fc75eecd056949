#pragma once
// The bytes of a checkpoint's slices, checked when they are first touched.

#include <filesystem>
#include <map>
#include <memory>
#include <vector>

#include "checkpoint/format/index.h"
#include "checkpoint/format/safetensors_reader.h"

namespace shoal {

// Opens files as they are needed. CheckpointErrors name the file, and the tensor and elements whose checksum is wrong;
// what was read of them until then is in the destination. One thread at a time.
class StoredFiles {
 public:
  // `index` must stay. verify: compares checksums, where there are any.
  StoredFiles(std::filesystem::path folder, const CheckpointIndex& index, bool verify);

  // `range` of the tensor's elements, in its own order, to `to`. Reads these bytes and, for checksums, the rest of the
  // piece_bytes in which they begin and end.
  void read(const StoredTensor& tensor, const Range& range, char* to);

 private:
  // Where a slice lies, and what is known of it.
  struct Place {
    int64_t offset = 0;  // in the file
    int64_t bytes = 0;
    std::vector<bool> verified{};  // by block
  };

  const SafetensorsReader& file(const std::string& name);
  Place& place(const StoredTensor& tensor, const StoredSlice& slice);
  void read_slice(const StoredTensor& tensor, const StoredSlice& slice, int64_t begin, int64_t end, char* to);
  void check(const StoredTensor& tensor, const StoredSlice& slice, int64_t block, const char* data, int64_t size) const;

  std::filesystem::path folder_;
  const CheckpointIndex& index_;
  bool verify_;
  std::map<std::string, std::unique_ptr<SafetensorsReader>> open_;
  std::map<const StoredSlice*, Place> places_;
  std::vector<char> block_;  // one that is needed in part
};

}  // namespace shoal
