#pragma once
// Files of a checkpoint, whose bytes are checked when they are first read.

#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "checkpoint/format/index.h"
#include "checkpoint/format/safetensors_reader.h"

namespace shoal {

// Opens files on demand. CheckpointErrors name the file, and the tensor and elements with a wrong checksum; the bytes
// read until then are in the destination. One thread at a time.
class StoredFiles {
 public:
  // `index` must outlive this object. verify: compare checksums, if there are any. whole_records: of a .pt file, too,
  // for which the whole record of a tensor is read first.
  StoredFiles(std::filesystem::path folder, const CheckpointIndex& index, bool verify, bool whole_records);

  // Reads `range` of the tensor's elements, in the tensor's own order, to `to`. For checksums, also reads the rest of
  // the first and the last block of piece_bytes.
  void read(const StoredTensor& tensor, const Range& range, char* to);
  // Whether there are checksums for the slice.
  bool has_checksums(const StoredTensor& tensor, const StoredSlice& slice);
  // Compares the checksums of the part-th of `parts` shares of a .pt file's records, of about equally many bytes each.
  void check_records(int part, int parts);

 private:
  // Place of a slice, and which of its blocks were verified.
  struct Place {
    int64_t offset = 0;  // in the file
    int64_t bytes = 0;
    std::vector<bool> verified{};  // by block
  };

  const SafetensorsReader& file(const std::string& name);
  Place& place(const StoredTensor& tensor, const StoredSlice& slice);
  void read_slice(const StoredTensor& tensor, const StoredSlice& slice, int64_t begin, int64_t end, char* to);
  void check_record(const StoredTensor& tensor, const InputFile& input, const ChecksummedBytes& record);
  void check(const StoredTensor& tensor, const StoredSlice& slice, int64_t block, const char* data, int64_t size) const;

  std::filesystem::path folder_;
  const CheckpointIndex& index_;
  bool verify_;
  bool whole_records_;
  std::map<std::string, std::unique_ptr<SafetensorsReader>> open_;
  std::map<const StoredSlice*, Place> places_;
  std::vector<char> block_;                                      // block of which only a part is needed
  std::set<std::pair<std::filesystem::path, int64_t>> checked_;  // records, by file and offset
};

}  // namespace shoal
