#include "checkpoint/format/foreign_index.h"

#include <fmt/format.h>

#include <map>
#include <utility>

#include "base/json_fields.h"
#include "base/strict_json.h"
#include "checkpoint/format/safetensors_reader.h"
#include "checkpoint/pt/pt_file.h"
#include "checkpoint/pt/zip_directory.h"
#include "shoal/error.h"

namespace shoal {
namespace {

void add(CheckpointIndex& index, const std::string& file, const std::string& name, const SafetensorsEntry& entry) {
  StoredTensor tensor{.name = name, .part = "model", .dtype = entry.dtype->type, .shape = entry.shape};
  tensor.slices.push_back({.file = file, .range = {0, tensor.numel()}});
  if (tensor.dtype == at::ScalarType::Undefined) tensor.foreign_bytes = entry.bytes;
  index.tensors.emplace(name, std::move(tensor));
}

CheckpointIndex empty_index(const std::string& library) {
  CheckpointIndex index;
  index.library = library;
  index.rank_states.push_back(nlohmann::json::object());
  return index;
}

CheckpointIndex index_of_pt(const InputFile& input) {
  auto index = empty_index("PyTorch");
  const auto file = input.path().filename().string();
  index.files[file] = input.size();
  std::map<std::pair<int64_t, int64_t>, std::string> first_at;  // by place
  for (const auto& [name, found] : read_pt(input)) {
    StoredTensor tensor{
        .name = name, .part = "model", .dtype = found.dtype, .shape = found.shape, .order = found.order};
    const auto first = first_at.try_emplace({found.offset, found.bytes}, name).first->second;
    if (found.bytes > 0 && first != name) tensor.same_as = first;
    tensor.slices.push_back({.file = file, .range = {0, tensor.numel()}});
    index.tensors.emplace(name, std::move(tensor));
  }
  return index;
}

}  // namespace

CheckpointIndex index_of_file(const std::filesystem::path& file) {
  if (const InputFile input(file, refuse_as<CheckpointError>); is_zip(input)) return index_of_pt(input);
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
  const auto json = parse_strict(text, {.bytes = index_limit(static_cast<int64_t>(text.size()))}, subject,
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
