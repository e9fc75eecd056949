#include "checkpoint/format/foreign_index.h"

#include <fmt/format.h>

#include "base/json_fields.h"
#include "base/strict_json.h"
#include "checkpoint/format/safetensors_reader.h"
#include "shoal/error.h"

namespace shoal {
namespace {

void add(CheckpointIndex& index, const std::string& file, const std::string& name, const SafetensorsEntry& entry) {
  StoredTensor tensor{.name = name, .part = "model", .dtype = entry.dtype->type, .shape = entry.shape};
  tensor.slices.push_back({.file = file, .range = {0, tensor.numel()}});
  index.tensors.emplace(name, std::move(tensor));
}

CheckpointIndex empty_index(const std::string& library) {
  CheckpointIndex index;
  index.library = library;
  index.rank_states.push_back(nlohmann::json::object());
  return index;
}

}  // namespace

CheckpointIndex index_of_file(const std::filesystem::path& file) {
  const SafetensorsReader reader(file);
  auto index = empty_index("safetensors");
  index.files[file.filename()] = reader.file().size();
  for (const auto& [name, entry] : reader.header().tensors) add(index, file.filename(), name, entry);
  return index;
}

CheckpointIndex index_of_sharded(const std::filesystem::path& folder) {
  const auto path = folder / sharded_name;
  const auto subject = path.string();
  const auto text = read_text(path, max_safetensors_header, refuse_as<CheckpointError>);
  const auto json = parse_strict(text, {.bytes = 4 * static_cast<int64_t>(text.size()) + json_allowance}, subject,
                                 refuse_as<CheckpointError>);
  // Other entries are allowed, because they occur in practice.
  const JsonFields fields(json, subject, refuse_as<CheckpointError>);
  const JsonFields files(fields.object("weight_map"), subject + ": weight_map", refuse_as<CheckpointError>);
  std::map<std::string, std::vector<std::string>> names;  // by file
  for (const auto& [name, file] : fields.object("weight_map").items()) names[files.text(name.c_str())].push_back(name);
  auto index = empty_index("safetensors, sharded");
  for (const auto& [file, list] : names) {
    if (!is_plain_name(file)) throw CheckpointError(fmt::format("{}: {:.200} is not a plain file name", subject, file));
    const SafetensorsReader reader(folder / file);
    index.files[file] = reader.file().size();
    for (const auto& name : list) add(index, file, name, reader.entry(name));
  }
  return index;
}

}  // namespace shoal
