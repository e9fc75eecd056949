#include "checkpoint/loading/export.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "checkpoint/format/atomic_file.h"
#include "checkpoint/format/foreign_index.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/pt/pt_file.h"
#include "checkpoint/saving/pieces.h"
#include "shoal/error.h"

namespace shoal {
namespace {

int64_t bytes_of(const StoredTensor& tensor) {
  return tensor.numel() * static_cast<int64_t>(c10::elementSize(tensor.dtype));
}

std::vector<const StoredTensor*> tensors_of(const CheckpointReader& reader, const std::string& part) {
  std::vector<const StoredTensor*> list;
  for (const auto& [name, tensor] : reader.index().tensors) {
    if (tensor.part == part) list.push_back(&reader.tensor(name));
  }
  if (list.empty()) throw UsageError(fmt::format("{} has no tensors of part {}", reader.path().string(), part));
  return list;
}

// Whether two tensors with the same bytes are equal.
bool same_view(const StoredTensor& a, const StoredTensor& b) {
  return a.dtype == b.dtype && a.shape == b.shape && a.order == b.order;
}

void write(const CheckpointReader& reader, const std::filesystem::path& path,
           const std::vector<const StoredTensor*>& tensors) {
  std::vector<SafetensorsFile::Entry> entries;
  for (const auto* tensor : tensors) entries.push_back({tensor->name, tensor->dtype, tensor->shape});
  SafetensorsFile file(path, entries, {{"format", "pt"}});
  for (const auto* tensor : tensors) {
    const auto most = piece_bytes / static_cast<int64_t>(c10::elementSize(tensor->dtype));
    const auto piece = at::empty({most}, tensor->dtype);
    for (int64_t begin = 0; begin < tensor->numel(); begin += most) {
      const auto part = piece.narrow(0, 0, std::min(most, tensor->numel() - begin));
      reader.read(tensor->name, {begin, begin + part.numel()}, part);
      file.write_elements(tensor->name, begin, part.data_ptr(), static_cast<int64_t>(part.nbytes()));
    }
  }
  file.complete();
  sync_folder(path.parent_path());
}

}  // namespace

void export_file(const CheckpointReader& reader, const std::filesystem::path& path, const std::string& part) {
  write(reader, target_of(path), tensors_of(reader, part));
}

void export_pt(const CheckpointReader& reader, const std::filesystem::path& path, const std::string& part) {
  NamedTensors tensors;
  std::map<std::string, at::Tensor> read;
  for (const auto* tensor : tensors_of(reader, part)) {
    const auto first = read.find(tensor->same_as);
    const bool tied = first != read.end() && same_view(*tensor, reader.tensor(tensor->same_as));
    const auto values = tied ? first->second : reader.read(tensor->name);
    read.emplace(tensor->name, values);
    tensors.emplace_back(tensor->name, values);
  }
  save_pt(path, tensors);
}

void export_folder(const CheckpointReader& reader, const std::filesystem::path& folder, int64_t shard_bytes,
                   const std::string& part) {
  if (shard_bytes < 1) throw UsageError(fmt::format("shards of {} bytes: give at least 1", shard_bytes));
  std::vector<std::vector<const StoredTensor*>> shards;
  int64_t total = 0;
  int64_t filled = 0;
  for (const auto* tensor : tensors_of(reader, part)) {
    const auto bytes = bytes_of(*tensor);
    if (shards.empty() || filled + bytes > shard_bytes) {
      shards.emplace_back();
      filled = 0;
    }
    shards.back().push_back(tensor);
    filled += bytes;
    total += bytes;
  }
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  for (const auto* name : {plain_name, sharded_name}) {
    if (!std::filesystem::exists(folder / name, error)) continue;
    throw UsageError(fmt::format("{} exists; export to a new folder", (folder / name).string()));
  }
  if (shards.size() == 1) return write(reader, folder / plain_name, shards.front());
  nlohmann::json weight_map;
  for (size_t i = 0; i < shards.size(); ++i) {
    const auto name = fmt::format("model-{:05d}-of-{:05d}.safetensors", i + 1, shards.size());
    write(reader, folder / name, shards[i]);
    for (const auto* tensor : shards[i]) weight_map[tensor->name] = name;
  }
  const nlohmann::json json = {{"metadata", {{"total_size", total}}}, {"weight_map", weight_map}};
  write_atomically(folder / sharded_name, json.dump(2) + '\n');
}

}  // namespace shoal
