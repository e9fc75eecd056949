#include "checkpoint/loading/reshard.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <vector>

#include "base/limits.h"
#include "checkpoint/folder.h"
#include "checkpoint/format/atomic_file.h"
#include "checkpoint/format/crc32.h"
#include "checkpoint/format/safetensors.h"
#include "checkpoint/format/safetensors_format.h"
#include "checkpoint/saving/pieces.h"
#include "checkpoint/saving/slice_plan.h"
#include "shoal/error.h"

namespace shoal {
namespace {

namespace fs = std::filesystem;

int64_t element_bytes(const StoredTensor& tensor) {
  return static_cast<int64_t>(c10::elementSize(tensor.dtype));
}

// Cuts the tensors, laid end to end as in the files, into ranges of equal size; an element belongs to the range in
// which it begins.
void cut(const std::vector<StoredTensor*>& tensors, int ranks) {
  int64_t total = 0;
  for (const auto* tensor : tensors) total += tensor->numel() * element_bytes(*tensor);
  const auto border = [&](int rank) { return total / ranks * rank + std::min<int64_t>(rank, total % ranks); };
  int64_t before = 0;  // bytes of the tensors before this one
  int rank = 0;
  for (auto* tensor : tensors) {
    const auto element = element_bytes(*tensor);
    const auto numel = tensor->numel();
    int64_t begin = 0;
    do {
      while (rank + 1 < ranks && before + begin * element >= border(rank + 1)) ++rank;
      const auto end = rank + 1 == ranks ? numel : std::min(numel, (border(rank + 1) - before + element - 1) / element);
      tensor->slices.push_back({.file = file_name(tensor->part, rank, ranks), .range = {begin, end}});
      begin = end;
    } while (begin < numel);
    before += numel * element;
  }
}

// Index of the new checkpoint, without checksums and files.
CheckpointIndex divide(const CheckpointReader& reader, int ranks) {
  auto index = reader.index();
  index.library = SHOAL_VERSION;
  index.files.clear();
  std::map<std::string, std::vector<StoredTensor*>> parts;
  for (auto& [name, tensor] : index.tensors) {
    parts[reader.tensor(name).part].push_back(&tensor);  // tensor() refuses dtypes that libtorch does not have
    tensor.slices.clear();
  }
  for (auto& [part, tensors] : parts) {
    std::stable_sort(tensors.begin(), tensors.end(), [](const auto* a, const auto* b) {
      return find_safetensors_dtype(a->dtype) < find_safetensors_dtype(b->dtype);
    });
    cut(tensors, ranks);
  }
  return index;
}

struct Part {
  const StoredTensor* tensor;
  StoredSlice* slice;
  std::string key;
};

// Writes a file; returns its size.
int64_t write_file(const CheckpointReader& reader, const fs::path& path, std::vector<Part>& parts) {
  // In the order of the file, so that it is written from front to back.
  std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) {
    const auto place = [](const Part& part) { return find_safetensors_dtype(part.tensor->dtype); };
    return std::tuple(place(a), a.key) < std::tuple(place(b), b.key);
  });
  std::vector<SafetensorsFile::Entry> entries;
  for (const auto& part : parts) {
    entries.push_back({part.key, part.tensor->dtype, slice_shape(*part.tensor, part.slice->range)});
  }
  SafetensorsFile file(path, entries, {{"format", "pt"}});
  for (const auto& part : parts) {
    const auto range = part.slice->range;
    const auto most = piece_bytes / element_bytes(*part.tensor);
    const auto piece = at::empty({std::min(most, range.size())}, part.tensor->dtype);
    BlockChecksums checksums(piece_bytes);
    for (auto begin = range.begin; begin < range.end; begin += most) {
      const auto here = Range{begin, begin + most}.intersect(range);
      const auto values = piece.narrow(0, 0, here.size());
      reader.read(part.tensor->name, here, values, {.order = part.tensor->order});
      checksums.add(values.data_ptr(), values.nbytes());
      file.write_elements(part.key, begin - range.begin, values.data_ptr(), static_cast<int64_t>(values.nbytes()));
    }
    part.slice->checksums = checksums.take();
  }
  file.complete();
  return file.size();
}

void write(const CheckpointReader& reader, CheckpointIndex& index, const fs::path& folder) {
  std::map<std::string, std::vector<Part>> files;
  for (auto& [name, tensor] : index.tensors) {
    for (auto& slice : tensor.slices) files[slice.file].push_back({&tensor, &slice, slice_key(tensor, slice.range)});
  }
  for (auto& [name, parts] : files) index.files[name] = write_file(reader, folder / name, parts);
  const auto text = index_text(index);
  require_loadable(text, (folder / index_name).string());
  write_atomically(folder / index_name, text);
}

// Allows what a save leaves behind or has locked.
void require_empty(const fs::path& root) {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(root, error)) {
    const auto name = entry.path().filename().string();
    if (name.starts_with('.')) continue;
    throw UsageError(fmt::format("{} exists; reshard to a new folder", entry.path().string()));
  }
}

}  // namespace

fs::path reshard(const CheckpointReader& reader, const fs::path& root, int ranks) {
  if (ranks < 1 || ranks > max_ranks) {
    throw UsageError(fmt::format("reshard: {} ranks; give 1 to {}", ranks, max_ranks));
  }
  auto index = divide(reader, ranks);
  require_empty(root);  // before the lock, which would create a file in a folder that is not ours
  const FolderLock lock(root);
  require_empty(root);
  remove_leftovers(root);
  const auto unfinished = make_unfinished(root, index.step);
  try {
    write(reader, index, unfinished);
    CheckpointReader(unfinished).verify();
    publish(root, unfinished, index.step);
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(unfinished, ignored);
    throw;
  }
  set_latest(root, index.step);
  return root / step_name(index.step);
}

}  // namespace shoal
