#include "checkpoint/loading/reader.h"

#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>
#include <optional>

#include "base/input_file.h"
#include "checkpoint/folder.h"
#include "checkpoint/format/foreign_index.h"
#include "checkpoint/loading/reorder.h"
#include "checkpoint/loading/stored_files.h"
#include "checkpoint/on_all_ranks.h"
#include "checkpoint/saving/pieces.h"
#include "comm/group/text.h"
#include "shoal/error.h"

namespace shoal {
namespace {

namespace fs = std::filesystem;

// An honest index describes no more bytes than the files have on disk.
int64_t bytes_in(const fs::path& folder) {
  int64_t sum = 0;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    sum += stored_bytes(entry.path());
  }
  return sum;
}

CheckpointIndex read_index(const fs::path& folder) {
  constexpr int64_t longest = 1LL << 30;
  const auto path = folder / index_name;
  const auto text = read_text(path, longest, refuse_as<CheckpointError>);
  const auto limit = std::max<int64_t>(0, bytes_in(folder) - static_cast<int64_t>(text.size())) + json_allowance;
  auto index = parse_index(text, limit, path.string());
  for (const auto& [name, size] : index.files) {
    std::error_code error;
    const auto found = fs::file_size(folder / name, error);
    if (error) throw CheckpointError(fmt::format("{}: {}", (folder / name).string(), error.message()));
    if (static_cast<int64_t>(found) != size) {
      throw CheckpointError(
          fmt::format("{} has {} bytes; it was written with {}", (folder / name).string(), found, size));
    }
  }
  return index;
}

bool is_folder(const fs::path& path) {
  std::error_code error;
  return fs::is_directory(path, error);
}

bool is_file(const fs::path& path) {
  std::error_code error;
  return fs::is_regular_file(path, error);
}

// The folder of the files, and their index.
std::pair<fs::path, CheckpointIndex> open_path(const fs::path& path) {
  if (!is_folder(path)) {
    const auto folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
    if (path.filename() == index_name) return {folder, read_index(folder)};
    if (path.filename() == sharded_name) return {folder, index_of_sharded(folder)};
    return {folder, index_of_file(path)};
  }
  if (is_file(path / index_name)) return {path, read_index(path)};
  if (is_file(path / sharded_name)) return {path, index_of_sharded(path)};
  if (is_file(path / plain_name)) return {path, index_of_file(path / plain_name)};
  throw CheckpointError(
      fmt::format("{} has no {}, latest, {} or {}", path.string(), index_name, plain_name, sharded_name));
}

}  // namespace

struct CheckpointReader::State {
  State(const fs::path& found, bool verify) : State(found, open_path(found), verify) {}
  State(fs::path found, std::pair<fs::path, CheckpointIndex> opened, bool verify)
      : path(std::move(found)),
        folder(std::move(opened.first)),
        index(std::move(opened.second)),
        files(folder, index, verify) {}

  void read(const StoredTensor& tensor, const Range& range, const Order& order, char* to) {
    if (same_order(order, tensor.order)) return files.read(tensor, range, to);
    read_reordered(tensor.shape, tensor.order, order, range, static_cast<int64_t>(c10::elementSize(tensor.dtype)), to,
                   [&](const Range& stored, char* piece) { files.read(tensor, stored, piece); });
  }

  fs::path path;
  fs::path folder;
  CheckpointIndex index;
  StoredFiles files;
};

CheckpointReader::CheckpointReader(const fs::path& path, bool verify)
    : state_(std::make_unique<State>(find_checkpoint(path), verify)) {}

CheckpointReader::~CheckpointReader() = default;
CheckpointReader::CheckpointReader(CheckpointReader&&) noexcept = default;

const fs::path& CheckpointReader::path() const {
  return state_->path;
}

const CheckpointIndex& CheckpointReader::index() const {
  return state_->index;
}

const StoredTensor& CheckpointReader::tensor(const std::string& name) const {
  const auto found = index().tensors.find(name);
  if (found == index().tensors.end()) throw UsageError(fmt::format("{} has no tensor {}", path().string(), name));
  if (found->second.dtype == at::ScalarType::Undefined) {
    throw UsageError(fmt::format("{}: tensor {} has a dtype that libtorch does not support", path().string(), name));
  }
  return found->second;
}

void CheckpointReader::read(const std::string& name, const Range& range, const at::Tensor& destination,
                            const ReadOptions& options) const {
  const auto& tensor = this->tensor(name);
  if (range.begin < 0 || range.end < range.begin || range.end > tensor.numel() || destination.numel() != range.size() ||
      !is_order(options.order, tensor.shape.size())) {
    throw UsageError(fmt::format("reading {}:{} of tensor {} with {} elements into {}: that does not fit", range.begin,
                                 range.end, name, tensor.numel(), destination.numel()));
  }
  const bool same_dtype = destination.scalar_type() == tensor.dtype;
  if (!same_dtype && !options.convert) {
    throw UsageError(fmt::format("{}: tensor {} is {}, but {} was requested; allow conversion", path().string(), name,
                                 c10::toString(tensor.dtype), c10::toString(destination.scalar_type())));
  }
  const torch::NoGradGuard no_grad;
  const auto widest =
      std::max<int64_t>(destination.element_size(), static_cast<int64_t>(c10::elementSize(tensor.dtype)));
  const auto most = piece_bytes / widest;
  for_each_part(destination.detach(), [&](const at::Tensor& part, int64_t first) {
    const auto begin = range.begin + first;
    const bool contiguous = part.is_contiguous();
    if (contiguous && part.is_cpu() && same_dtype) {
      return state_->read(tensor, {begin, begin + part.numel()}, options.order, static_cast<char*>(part.data_ptr()));
    }
    const auto size = contiguous ? most : part.numel();  // non-contiguous parts are small
    for (int64_t done = 0; done < part.numel(); done += size) {
      const auto here = std::min(size, part.numel() - done);
      const auto piece = at::empty({here}, tensor.dtype);
      state_->read(tensor, {begin + done, begin + done + here}, options.order, static_cast<char*>(piece.data_ptr()));
      if (contiguous) {
        part.view({-1}).narrow(0, done, here).copy_(piece);
      } else {
        at::Tensor(part).copy_(piece.view(part.sizes()));
      }
    }
  });
}

at::Tensor CheckpointReader::read(const std::string& name) const {
  const auto& tensor = this->tensor(name);
  at::Tensor whole;
  try {
    whole = at::empty(tensor.shape, tensor.dtype);
  } catch (const c10::Error&) {
    throw CheckpointError(fmt::format("{}: no memory for the {} elements of tensor {:.200} ({})", path().string(),
                                      tensor.numel(), name, c10::toString(tensor.dtype)));
  }
  read(name, {0, tensor.numel()}, whole);
  return whole;
}

CheckpointReader::Verified CheckpointReader::verify() const {
  Verified verified;
  StoredFiles files(state_->folder, index(), /*verify=*/true);
  std::vector<char> piece(piece_bytes);
  for (const auto& [name, tensor] : index().tensors) {
    if (tensor.dtype == at::ScalarType::Undefined) continue;
    const auto element = static_cast<int64_t>(c10::elementSize(tensor.dtype));
    for (const auto& slice : tensor.slices) {
      for (auto begin = slice.range.begin; begin < slice.range.end; begin += piece_bytes / element) {
        files.read(tensor, Range{begin, begin + piece_bytes / element}.intersect(slice.range), piece.data());
      }
      verified.bytes += slice.range.size() * element;
      if (slice.checksums.empty()) verified.unchecked += slice.range.size() * element;
    }
  }
  return verified;
}

CheckpointReader open_checkpoint(const Group& group, const fs::path& path, bool verify) {
  std::string found;
  on_all_ranks(group, "checkpoint", [&] {
    if (group.rank() == 0) found = find_checkpoint(path);
  });
  found = broadcast_text(group, found, 0, {-1, -1, "checkpoint"});
  std::optional<CheckpointReader> reader;
  on_all_ranks(group, "checkpoint", [&] { reader.emplace(found, verify); });
  return std::move(*reader);
}

}  // namespace shoal
