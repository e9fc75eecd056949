#pragma once
// Index of a checkpoint (index.json): files, tensors and state. docs/checkpoints.md defines the format.

#include <torch/types.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "shoal/detail/range.h"

namespace shoal {

constexpr const char* index_name = "index.json";

// Part of a tensor in one of the checkpoint's files.
struct StoredSlice {
  std::string file;
  Range range;                        // elements of the tensor, counted in StoredTensor::order
  std::vector<uint32_t> checksums{};  // CRC-32 of each piece_bytes, the last may be shorter; empty: unknown
};

struct StoredTensor {
  std::string name;
  std::string part;              // "model" for parameters and buffers; other names are the saver's choice
  at::ScalarType dtype;          // Undefined: libtorch does not have it
  std::vector<int64_t> shape;    // of the whole tensor
  std::vector<int64_t> order{};  // order of dimensions, slowest first, in which elements are counted; empty: row-major
  std::vector<StoredSlice> slices{};  // ascending and disjoint; together they cover the tensor
  std::string same_as{};              // another tensor with the same bytes (tied weights in .pt files); empty: none
  int64_t foreign_bytes = 0;          // of a tensor whose dtype is Undefined

  int64_t numel() const;
};

struct CheckpointIndex {
  std::string library;  // version of shoal that wrote it
  int64_t step = 0;
  std::string strategy;                    // strategy that wrote it; readers may ignore it
  int world_size = 1;                      // of the writer; readers may ignore it
  std::map<std::string, int64_t> files{};  // bytes by file name
  std::map<std::string, StoredTensor> tensors{};
  nlohmann::json global_state = nlohmann::json::object();
  std::vector<nlohmann::json> rank_states{};  // by rank
  std::string checksum{};                     // of the text that was parsed; empty: it was made otherwise
};

// Key of a slice in its file: the tensor's name if the slice is the whole tensor in row-major order (with the tensor's
// shape); else "name[begin:end]" (one-dimensional).
std::string slice_key(const StoredTensor& tensor, const Range& range);
std::vector<int64_t> slice_shape(const StoredTensor& tensor, const Range& range);
// Whether the slice is stored as the whole tensor.
bool is_whole(const StoredTensor& tensor, const Range& range);

// Whether it is a plain file name, which cannot lead out of its folder.
bool is_plain_name(const std::string& name);
// Whether it is a valid name of a part: lower-case letters, digits, "_".
bool is_part_name(const std::string& name);
// Whether `order` is empty or a permutation of the dimensions.
bool is_order(const std::vector<int64_t>& order, size_t dimensions);

std::string index_text(const CheckpointIndex& index);

// Bytes of an index's text that can be read again.
constexpr int64_t longest_index = int64_t{1} << 30;
// CheckpointError, which begins with `subject`, for the text of an index that a load would refuse.
void require_loadable(const std::string& text, const std::string& subject, int64_t longest = longest_index);

// Parses an index. CheckpointError, which begins with `subject`, for any departure from the format: overlapping or
// missing slices, slices beyond their tensor, file names that are not plain, a wrong checksum of the index itself, and
// so on. limit: bytes of memory that the index may take.
CheckpointIndex parse_index(std::string_view text, int64_t limit, const std::string& subject);

}  // namespace shoal
