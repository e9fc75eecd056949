#pragma once
// Safetensors format, shared by writer and reader: a 64-bit little-endian length, that many bytes of JSON, and the
// tensors' bytes without gaps (https://github.com/huggingface/safetensors).

#include <torch/types.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace shoal {

constexpr size_t most_dimensions = 64;  // libtorch's limit, and short enough for an error message
constexpr int64_t max_safetensors_header = 100'000'000;
// Memory that a file's JSON may take beyond the bytes that the file has on disk; see InputFile::stored().
constexpr int64_t json_allowance = int64_t{60} << 20;
// Memory that an index may take. Of many small tensors, it is nine times the text.
constexpr int64_t index_limit(int64_t text_bytes) {
  return json_allowance + 10 * text_bytes;
}
constexpr const char* safetensors_metadata = "__metadata__";

// Dtype of the format; `type` is Undefined if libtorch does not have it. In the order in which the reference writer
// places tensors: widest first, so that each begins at a multiple of its element size.
struct SafetensorsDtype {
  const char* name;
  int bits;
  at::ScalarType type;
};
// nullptr if there is none.
const SafetensorsDtype* find_safetensors_dtype(std::string_view name);
const SafetensorsDtype* find_safetensors_dtype(at::ScalarType type);

// Number of elements; -1 if a size is negative, or the count or its bytes exceed 63 bits.
int64_t checked_numel(const std::vector<int64_t>& shape);

// Bytes of a file with one CRC-32, such as a record of a .pt file.
struct ChecksummedBytes {
  int64_t offset = 0;
  int64_t bytes = 0;
  uint32_t checksum = 0;
};

struct SafetensorsEntry {
  const SafetensorsDtype* dtype = nullptr;
  std::vector<int64_t> shape;
  int64_t offset = 0;  // bytes, in the file
  int64_t bytes = 0;
  std::optional<ChecksummedBytes> record{};  // of a .pt file, that with the tensor, unless it has no checksum
};

struct SafetensorsHeader {
  std::map<std::string, SafetensorsEntry> tensors;
  std::map<std::string, std::string> metadata;
};

// Parses the first 8 bytes of a file of `file_size` bytes; returns the length of the header. CheckpointError, which
// begins with `subject`, if the file is too small for it or it exceeds the format's limit.
int64_t parse_safetensors_length(const unsigned char* eight_bytes, int64_t file_size, const std::string& subject);

// Parses the header. CheckpointError, which begins with `subject`, for any departure from the format: unknown or
// repeated entries, a dtype or shape that does not fit its bytes, gaps, overlaps, bytes before the first or after the
// last tensor. limit: bytes of memory that its JSON may take, some 800 per tensor.
SafetensorsHeader parse_safetensors_header(std::string_view text, int64_t file_size, int64_t limit,
                                           const std::string& subject);

}  // namespace shoal
