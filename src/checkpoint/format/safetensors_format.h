#pragma once
// The safetensors format, shared by writer and reader: a 64-bit little-endian length, that many bytes of JSON, and the
// tensors' bytes without gaps (https://github.com/huggingface/safetensors).

#include <torch/types.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace shoal {

constexpr size_t most_dimensions = 64;  // what libtorch serves, and short enough for a message
constexpr int64_t max_safetensors_header = 100'000'000;
// What the JSON of a file may take in memory beyond the bytes that the file really has on its disk, see
// InputFile::stored().
constexpr int64_t json_allowance = int64_t{60} << 20;
constexpr const char* safetensors_metadata = "__metadata__";

// One of the format's dtypes; `type` is Undefined where libtorch has none. In the order in which the format's own
// writer places tensors: wide ones first, so that each begins at a multiple of its elements' size.
struct SafetensorsDtype {
  const char* name;
  int bits;
  at::ScalarType type;
};
// Null where there is none.
const SafetensorsDtype* find_safetensors_dtype(std::string_view name);
const SafetensorsDtype* find_safetensors_dtype(at::ScalarType type);

// The number of elements; -1 where it, or the bytes that they take, go beyond 63 bits, or a size is below zero.
int64_t checked_numel(const std::vector<int64_t>& shape);

struct SafetensorsEntry {
  const SafetensorsDtype* dtype = nullptr;
  std::vector<int64_t> shape;
  int64_t offset = 0;  // bytes, in the file
  int64_t bytes = 0;
};

struct SafetensorsHeader {
  std::map<std::string, SafetensorsEntry> tensors;
  std::map<std::string, std::string> metadata;
};

// The first 8 bytes of a file of `file_size` bytes: the length of what follows. CheckpointError that begins with
// `subject` unless the file is large enough for it and it is within the format's limit.
int64_t parse_safetensors_length(const unsigned char* eight_bytes, int64_t file_size, const std::string& subject);

// `text`: that many bytes. Whatever departs from the format is a CheckpointError that begins with `subject`: unknown or
// repeated entries, a dtype or shape that does not fit its bytes, gaps, overlaps, bytes before the first tensor or
// behind the last. `limit`: bytes of memory that its JSON may take, some 800 for a tensor.
SafetensorsHeader parse_safetensors_header(std::string_view text, int64_t file_size, int64_t limit,
                                           const std::string& subject);

}  // namespace shoal
