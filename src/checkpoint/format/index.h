#pragma once
// The index.json of a checkpoint: its files, tensors and state. docs/checkpoints.md has the format.

#include <torch/types.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "shoal/detail/range.h"

namespace shoal {

constexpr const char* index_name = "index.json";

// A part of a tensor in one of the checkpoint's files.
struct StoredSlice {
  std::string file;
  Range range;                        // elements of the whole tensor, counted in StoredTensor::order
  std::vector<uint32_t> checksums{};  // CRC-32 of each piece_bytes of it, the last may be shorter; none: not known
};

struct StoredTensor {
  std::string name;
  std::string part;              // "model" for parameters and buffers; others as whoever saves likes
  at::ScalarType dtype;          // Undefined: one that libtorch does not have
  std::vector<int64_t> shape;    // of the whole
  std::vector<int64_t> order{};  // of dimensions, the slowest first, in which elements are counted; empty: row-major
  std::vector<StoredSlice> slices{};  // ascending and disjoint; together they are the whole

  int64_t numel() const;
};

struct CheckpointIndex {
  std::string library;  // version that wrote it
  int64_t step = 0;
  std::string strategy;                    // that it was written by; a reader need not care
  int world_size = 1;                      // the same
  std::map<std::string, int64_t> files{};  // bytes by name
  std::map<std::string, StoredTensor> tensors{};
  nlohmann::json global_state = nlohmann::json::object();
  std::vector<nlohmann::json> rank_states{};  // by rank
};

// The name under which a slice lies in its file: the tensor's where it is the whole in row-major order, with the
// whole's shape; else "name[begin:end]", with one dimension.
std::string slice_key(const StoredTensor& tensor, const Range& range);
std::vector<int64_t> slice_shape(const StoredTensor& tensor, const Range& range);
// Whether the slice lies there as the whole tensor.
bool is_whole(const StoredTensor& tensor, const Range& range);

// A plain file name that cannot lead out of its folder.
bool is_plain_name(const std::string& name);
// A name for a part: small letters, digits, "_".
bool is_part_name(const std::string& name);
// Whether `order` is empty or a permutation of the dimensions.
bool is_order(const std::vector<int64_t>& order, size_t dimensions);

std::string index_text(const CheckpointIndex& index);
// CheckpointError that begins with `subject` for whatever departs from the format: slices that overlap, leave something
// out or go beyond their tensor, files that are no plain names, a checksum of its own that is wrong, ... `limit`: bytes
// of memory that it may take.
CheckpointIndex parse_index(std::string_view text, int64_t limit, const std::string& subject);

}  // namespace shoal
