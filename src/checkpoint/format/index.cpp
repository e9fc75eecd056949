#include "checkpoint/format/index.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "base/json_fields.h"
#include "base/strict_json.h"
#include "checkpoint/format/crc32.h"
#include "checkpoint/format/safetensors_format.h"
#include "checkpoint/saving/pieces.h"
#include "shoal/error.h"

namespace shoal {
namespace {

using Json = nlohmann::json;

constexpr const char* format_name = "shoal-checkpoint";
constexpr int64_t format_version = 1;
constexpr size_t hex_digits = 8;

std::string hex(const std::vector<uint32_t>& checksums) {
  std::string text;
  for (const auto checksum : checksums) text += fmt::format("{:08x}", checksum);
  return text;
}

std::vector<uint32_t> from_hex(const std::string& text, const std::string& subject) {
  std::vector<uint32_t> list;
  const auto digit = [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); };
  if (text.size() % hex_digits != 0 || !std::all_of(text.begin(), text.end(), digit)) {
    throw CheckpointError(subject + ": crc32 is not groups of 8 hexadecimal digits");
  }
  for (const auto* at = text.data(); at < text.data() + text.size(); at += hex_digits) {
    std::from_chars(at, at + hex_digits, list.emplace_back(), 16);
  }
  return list;
}

// End of the file: a checksum of everything before it.
std::string trailer(std::string_view before) {
  return fmt::format(",\"crc32\":\"{:08x}\"}}\n", crc32(before.data(), before.size()));
}

StoredSlice parse_slice(const Json& json, const StoredTensor& tensor, const CheckpointIndex& index,
                        const std::string& subject) {
  const JsonFields fields(json, subject, refuse_as<CheckpointError>);
  fields.only({"file", "begin", "end", "crc32"});
  StoredSlice slice{.file = fields.text("file"), .range = {fields.number("begin"), fields.number("end")}};
  slice.checksums = from_hex(fields.text("crc32"), subject);
  if (index.files.count(slice.file) == 0) throw CheckpointError(subject + ": its file is not in the list of files");
  if (slice.range.begin > slice.range.end || slice.range.end > tensor.numel()) {
    throw CheckpointError(fmt::format("{}: slice {}:{} goes beyond its {} elements", subject, slice.range.begin,
                                      slice.range.end, tensor.numel()));
  }
  const auto bytes = slice.range.size() * static_cast<int64_t>(c10::elementSize(tensor.dtype));
  if (static_cast<int64_t>(slice.checksums.size()) != (bytes + piece_bytes - 1) / piece_bytes) {
    throw CheckpointError(subject + ": its number of checksums does not fit its size");
  }
  return slice;
}

// Slices must cover the tensor, each element once.
void check_cover(const StoredTensor& tensor, const std::string& subject) {
  const auto numel = tensor.numel();
  int64_t end = 0;
  for (const auto& slice : tensor.slices) {
    if (slice.range.begin != end || (slice.range.empty() && numel > 0)) {
      throw CheckpointError(fmt::format("{}: slice {}:{} of {} elements does not continue at {}", subject,
                                        slice.range.begin, slice.range.end, numel, end));
    }
    end = slice.range.end;
  }
  if (end != numel) throw CheckpointError(fmt::format("{}: elements {}:{} are in no slice", subject, end, numel));
  if (numel == 0 && tensor.slices.size() > 1) throw CheckpointError(subject + ": several slices of nothing");
}

// Ensures that reading takes no more memory than the files have bytes; that the files have these is checked elsewhere.
void check_room(const CheckpointIndex& index, const std::string& subject) {
  auto room = index.files;
  for (const auto& [name, tensor] : index.tensors) {
    for (const auto& slice : tensor.slices) {
      auto& left = room.at(slice.file);
      const auto bytes = slice.range.size() * static_cast<int64_t>(c10::elementSize(tensor.dtype));
      if (bytes > left)
        throw CheckpointError(fmt::format("{}: {:.200} is too small for its tensors", subject, slice.file));
      left -= bytes;
    }
  }
}

StoredTensor parse_tensor(const std::string& name, const Json& json, const CheckpointIndex& index,
                          const std::string& subject) {
  const JsonFields fields(json, subject, refuse_as<CheckpointError>);
  fields.only({"part", "dtype", "shape", "order", "slices"});
  const auto* dtype = find_safetensors_dtype(fields.text("dtype"));
  if (dtype == nullptr || dtype->type == at::ScalarType::Undefined) {
    throw CheckpointError(fmt::format("{}: unknown dtype {:.200}", subject, fields.text("dtype")));
  }
  StoredTensor tensor{
      .name = name, .part = fields.text("part"), .dtype = dtype->type, .shape = fields.numbers("shape")};
  if (fields.has("order")) tensor.order = fields.numbers("order");
  if (!is_part_name(tensor.part)) throw CheckpointError(subject + ": part is not a plain name");
  if (tensor.shape.size() > most_dimensions) {
    throw CheckpointError(
        fmt::format("{}: {} dimensions; at most {} are read", subject, tensor.shape.size(), most_dimensions));
  }
  if (checked_numel(tensor.shape) < 0) throw CheckpointError(subject + ": its shape is too large");
  if (!is_order(tensor.order, tensor.shape.size())) {
    throw CheckpointError(subject + ": order is not a permutation of its dimensions");
  }
  for (const auto& slice : fields.array("slices")) {
    tensor.slices.push_back(parse_slice(slice, tensor, index, subject));
  }
  std::sort(tensor.slices.begin(), tensor.slices.end(),
            [](const auto& a, const auto& b) { return a.range.begin < b.range.begin; });
  check_cover(tensor, subject);
  return tensor;
}

Json to_json(const StoredTensor& tensor) {
  Json slices = Json::array();
  for (const auto& slice : tensor.slices) {
    slices.push_back({{"file", slice.file},
                      {"begin", slice.range.begin},
                      {"end", slice.range.end},
                      {"crc32", hex(slice.checksums)}});
  }
  Json json = {{"part", tensor.part},
               {"dtype", find_safetensors_dtype(tensor.dtype)->name},
               {"shape", tensor.shape},
               {"slices", slices}};
  if (!tensor.order.empty()) json["order"] = tensor.order;
  return json;
}

}  // namespace

int64_t StoredTensor::numel() const {
  return c10::multiply_integers(shape);
}

bool is_whole(const StoredTensor& tensor, const Range& range) {
  return tensor.order.empty() && range.size() == tensor.numel();
}

std::string slice_key(const StoredTensor& tensor, const Range& range) {
  return is_whole(tensor, range) ? tensor.name : fmt::format("{}[{}:{}]", tensor.name, range.begin, range.end);
}

std::vector<int64_t> slice_shape(const StoredTensor& tensor, const Range& range) {
  return is_whole(tensor, range) ? tensor.shape : std::vector<int64_t>{range.size()};
}

bool is_plain_name(const std::string& name) {
  constexpr size_t longest = 200;
  const auto odd = [](char c) { return c == '/' || c == '\\' || static_cast<unsigned char>(c) < ' '; };
  return !name.empty() && name.size() <= longest && name.front() != '.' && std::none_of(name.begin(), name.end(), odd);
}

bool is_part_name(const std::string& name) {
  const auto plain = [](char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_'; };
  return is_plain_name(name) && std::all_of(name.begin(), name.end(), plain);
}

bool is_order(const std::vector<int64_t>& order, size_t dimensions) {
  if (order.empty()) return true;
  auto sorted = order;
  std::sort(sorted.begin(), sorted.end());
  for (size_t i = 0; i < sorted.size(); ++i) {
    if (sorted[i] != static_cast<int64_t>(i)) return false;
  }
  return order.size() == dimensions;
}

std::string index_text(const CheckpointIndex& index) {
  Json tensors = Json::object();
  for (const auto& [name, tensor] : index.tensors) tensors[name] = to_json(tensor);
  nlohmann::ordered_json json = {{"format", format_name},
                                 {"version", format_version},
                                 {"library", index.library},
                                 {"step", index.step},
                                 {"strategy", index.strategy},
                                 {"world_size", index.world_size},
                                 {"files", index.files},
                                 {"tensors", tensors},
                                 {"state", {{"global", index.global_state}, {"ranks", index.rank_states}}}};
  auto text = json.dump();
  text.pop_back();
  return text + trailer(text);
}

void require_loadable(const std::string& text, const std::string& subject, int64_t longest) {
  const auto bytes = static_cast<int64_t>(text.size());
  if (bytes > longest) {
    throw CheckpointError(
        fmt::format("{} has {} bytes, {} at most: fewer tensors, fewer ranks that divide them, or a shorter position",
                    subject, bytes, longest));
  }
  static_cast<void>(parse_index(text, index_limit(bytes), subject));
}

CheckpointIndex parse_index(std::string_view text, int64_t limit, const std::string& subject) {
  const auto end = trailer({}).size();
  const auto before = text.substr(0, text.size() - std::min(end, text.size()));
  const auto json = parse_strict(text, {.bytes = limit}, subject, refuse_as<CheckpointError>);
  const JsonFields fields(json, subject, refuse_as<CheckpointError>);
  if (fields.text("format") != format_name) throw CheckpointError(subject + ": not the index of a shoal checkpoint");
  if (fields.number("version") != format_version) {
    throw CheckpointError(fmt::format("{}: format version {}; this library reads version {}", subject,
                                      fields.number("version"), format_version));
  }
  if (text.substr(before.size()) != trailer(before))
    throw CheckpointError(subject + ": damaged: the checksum does not match");
  fields.only({"format", "version", "library", "step", "strategy", "world_size", "files", "tensors", "state", "crc32"});
  CheckpointIndex index{
      .library = fields.text("library"), .step = fields.number("step"), .strategy = fields.text("strategy")};
  index.checksum = fields.text("crc32");
  const JsonFields files(fields.object("files"), subject + ": files", refuse_as<CheckpointError>);
  for (const auto& [name, size] : fields.object("files").items()) {
    if (!is_plain_name(name)) throw CheckpointError(fmt::format("{}: {:.200} is not a plain file name", subject, name));
    index.files[name] = files.number(name.c_str());
  }
  for (const auto& [name, tensor] : fields.object("tensors").items()) {
    index.tensors.emplace(name, parse_tensor(name, tensor, index, fmt::format("{}: {:.200}", subject, name)));
  }
  check_room(index, subject);
  const JsonFields state(fields.object("state"), subject + ": state", refuse_as<CheckpointError>);
  state.only({"global", "ranks"});
  index.global_state = state.object("global");
  for (const auto& rank : state.array("ranks")) index.rank_states.push_back(rank);
  index.world_size = static_cast<int>(std::min<int64_t>(fields.number("world_size"), std::numeric_limits<int>::max()));
  if (index.rank_states.size() != static_cast<size_t>(index.world_size)) {
    throw CheckpointError(subject + ": state.ranks has not one entry per rank");
  }
  return index;
}

}  // namespace shoal
