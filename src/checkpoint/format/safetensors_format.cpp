#include "checkpoint/format/safetensors_format.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>

#include "base/json_fields.h"
#include "base/strict_json.h"
#include "shoal/error.h"

namespace shoal {
namespace {

constexpr SafetensorsDtype dtypes[] = {
    {"U64", 64, at::kUInt64},
    {"I64", 64, at::kLong},
    {"F64", 64, at::kDouble},
    {"C64", 64, at::kComplexFloat},
    {"F32", 32, at::kFloat},
    {"U32", 32, at::kUInt32},
    {"I32", 32, at::kInt},
    {"BF16", 16, at::kBFloat16},
    {"F16", 16, at::kHalf},
    {"U16", 16, at::kUInt16},
    {"I16", 16, at::kShort},
    {"F8_E5M2FNUZ", 8, at::kFloat8_e5m2fnuz},
    {"F8_E4M3FNUZ", 8, at::kFloat8_e4m3fnuz},
    {"F8_E8M0", 8, at::kFloat8_e8m0fnu},
    {"F8_E4M3", 8, at::kFloat8_e4m3fn},
    {"F8_E5M2", 8, at::kFloat8_e5m2},
    {"I8", 8, at::kChar},
    {"U8", 8, at::kByte},
    {"F6_E3M2", 6, at::ScalarType::Undefined},
    {"F6_E2M3", 6, at::ScalarType::Undefined},
    {"F4", 4, at::ScalarType::Undefined},
    {"BOOL", 8, at::kBool},
};

constexpr int64_t length_bytes = 8;

SafetensorsEntry parse_entry(const nlohmann::json& json, const std::string& subject) {
  const JsonFields fields(json, subject, refuse_as<CheckpointError>);
  fields.only({"dtype", "shape", "data_offsets"});
  SafetensorsEntry entry{.dtype = find_safetensors_dtype(fields.text("dtype")), .shape = fields.numbers("shape")};
  if (entry.dtype == nullptr)
    throw CheckpointError(fmt::format("{}: unknown dtype {:.200}", subject, fields.text("dtype")));
  if (entry.shape.size() > most_dimensions) {
    throw CheckpointError(
        fmt::format("{}: {} dimensions; at most {} are read", subject, entry.shape.size(), most_dimensions));
  }
  const auto offsets = fields.numbers("data_offsets");
  if (offsets.size() != 2 || offsets[1] < offsets[0]) {
    throw CheckpointError(fmt::format("{}: data_offsets must be two numbers in ascending order", subject));
  }
  const auto numel = checked_numel(entry.shape);
  const auto bits = numel * entry.dtype->bits;
  entry.bytes = offsets[1] - offsets[0];
  if (numel < 0 || bits % 8 != 0 || bits / 8 != entry.bytes) {
    throw CheckpointError(fmt::format("{}: {} bytes cannot hold shape [{}] in {}", subject, entry.bytes,
                                      fmt::join(entry.shape, ", "), entry.dtype->name));
  }
  entry.offset = offsets[0];  // relative until the whole header is checked
  return entry;
}

// The tensors' bytes, in order of offset, must fill the file from the end of the header.
void check_places(std::map<std::string, SafetensorsEntry>& tensors, int64_t data_begin, int64_t file_size,
                  const std::string& subject) {
  std::vector<std::pair<const std::string*, SafetensorsEntry*>> order;
  for (auto& [name, entry] : tensors) order.emplace_back(&name, &entry);
  std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return std::pair(a.second->offset, a.second->bytes) < std::pair(b.second->offset, b.second->bytes);
  });
  int64_t end = 0;
  for (const auto& [name, entry] : order) {
    if (entry->offset != end) {
      throw CheckpointError(
          fmt::format("{}: tensor {:.200} begins at byte {} of the data, the one before it ends at {}", subject, *name,
                      entry->offset, end));
    }
    if (entry->bytes > file_size - data_begin - end) {
      throw CheckpointError(fmt::format("{}: tensor {:.200} goes beyond the end of the file", subject, *name));
    }
    end += entry->bytes;
    entry->offset += data_begin;
  }
  if (data_begin + end != file_size) {
    throw CheckpointError(fmt::format("{}: {} bytes behind the last tensor", subject, file_size - data_begin - end));
  }
}

}  // namespace

const SafetensorsDtype* find_safetensors_dtype(std::string_view name) {
  const auto* found = std::find_if(std::begin(dtypes), std::end(dtypes), [&](const auto& d) { return name == d.name; });
  return found == std::end(dtypes) ? nullptr : found;
}

const SafetensorsDtype* find_safetensors_dtype(at::ScalarType type) {
  if (type == at::ScalarType::Undefined) return nullptr;
  const auto* found = std::find_if(std::begin(dtypes), std::end(dtypes), [&](const auto& d) { return type == d.type; });
  return found == std::end(dtypes) ? nullptr : found;
}

int64_t checked_numel(const std::vector<int64_t>& shape) {
  // So that a count of bits fits for the widest dtype.
  constexpr int64_t most = std::numeric_limits<int64_t>::max() / 128;
  if (std::any_of(shape.begin(), shape.end(), [](int64_t size) { return size < 0; })) return -1;
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  int64_t numel = 1;
  for (const auto size : shape) {
    if (size > most / numel) return -1;
    numel *= size;
  }
  return numel;
}

int64_t parse_safetensors_length(const unsigned char* eight_bytes, int64_t file_size, const std::string& subject) {
  if (file_size < length_bytes) throw CheckpointError(fmt::format("{}: {} bytes are no header", subject, file_size));
  uint64_t length = 0;
  for (int i = 0; i < length_bytes; ++i) length |= static_cast<uint64_t>(eight_bytes[i]) << (8 * i);
  if (length > static_cast<uint64_t>(max_safetensors_header)) {
    throw CheckpointError(fmt::format("{}: a header of {} bytes; the format allows {}. Is it a safetensors file?",
                                      subject, length, max_safetensors_header));
  }
  if (static_cast<int64_t>(length) > file_size - length_bytes) {
    throw CheckpointError(
        fmt::format("{}: truncated: a header of {} bytes in a file of {}", subject, length, file_size));
  }
  return static_cast<int64_t>(length);
}

SafetensorsHeader parse_safetensors_header(std::string_view text, int64_t file_size, int64_t limit,
                                           const std::string& subject) {
  if (text.empty() || text.front() != '{') {
    throw CheckpointError(fmt::format("{}: its header does not begin with {{", subject));
  }
  const auto json = parse_strict(text, {.bytes = limit}, subject, refuse_as<CheckpointError>);
  const auto data_begin = length_bytes + static_cast<int64_t>(text.size());
  SafetensorsHeader header;
  for (const auto& [name, value] : json.items()) {
    const auto about = fmt::format("{}: {:.200}", subject, name);
    if (name != safetensors_metadata) {
      header.tensors.emplace(name, parse_entry(value, about));
      continue;
    }
    if (value.is_null()) continue;  // the reference library reads it
    const JsonFields fields(value, about, refuse_as<CheckpointError>);
    for (const auto& [key, entry] : value.items()) header.metadata[key] = fields.text(key.c_str());
  }
  check_places(header.tensors, data_begin, file_size, subject);
  return header;
}

}  // namespace shoal
