#include "checkpoint/loading/reader.h"

#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>
#include <functional>
#include <optional>

#include "base/input_file.h"
#include "checkpoint/folder.h"
#include "checkpoint/format/foreign_index.h"
#include "checkpoint/loading/stored_files.h"
#include "checkpoint/on_all_ranks.h"
#include "checkpoint/saving/pieces.h"
#include "comm/group/text.h"
#include "shoal/error.h"

namespace shoal {
namespace {

namespace fs = std::filesystem;

CheckpointIndex read_index(const fs::path& folder) {
  const auto path = folder / index_name;
  const auto text = read_text(path, longest_index, refuse_as<CheckpointError>);
  auto index = parse_index(text, index_limit(static_cast<int64_t>(text.size())), path.string());
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

// The same number for the same index.
double digest_of(const CheckpointIndex& index) {
  auto text = index.checksum;
  for (const auto& [name, size] : index.files) text += fmt::format("\n{} {}", name, size);
  return static_cast<double>(std::hash<std::string>()(text) >> 11);  // as many bits as a double has
}

}  // namespace

class CheckpointReader::Files : public SliceSource {
 public:
  Files(fs::path found, bool verify, bool whole_records) : Files(found, open_path(found), verify, whole_records) {}

  std::string name() const override { return path_.string(); }
  const CheckpointIndex& index() const override { return index_; }
  void read(const StoredTensor& tensor, const Range& range, char* to) override { files_.read(tensor, range, to); }

  void check_records(int part, int parts) { files_.check_records(part, parts); }

  const fs::path& path() const { return path_; }
  const fs::path& folder() const { return folder_; }

 private:
  Files(fs::path found, std::pair<fs::path, CheckpointIndex> opened, bool verify, bool whole_records)
      : path_(std::move(found)),
        folder_(std::move(opened.first)),
        index_(std::move(opened.second)),
        files_(folder_, index_, verify, whole_records) {}

  fs::path path_;
  fs::path folder_;
  CheckpointIndex index_;
  StoredFiles files_;
};

CheckpointReader::CheckpointReader(const fs::path& path, bool verify, bool whole_records)
    : CheckpointReader(std::make_shared<Files>(find_checkpoint(path), verify, whole_records)) {}

CheckpointReader::CheckpointReader(std::shared_ptr<Files> files) : SliceReader(files), files_(std::move(files)) {}

const fs::path& CheckpointReader::path() const {
  return files_->path();
}

CheckpointReader::Verified CheckpointReader::verify() const {
  Verified verified;
  StoredFiles files(files_->folder(), index(), /*verify=*/true, /*whole_records=*/true);
  std::vector<char> piece(piece_bytes);
  for (const auto& [name, tensor] : index().tensors) {
    if (tensor.dtype == at::ScalarType::Undefined) {
      ++verified.unread;
      continue;
    }
    const auto element = static_cast<int64_t>(c10::elementSize(tensor.dtype));
    for (const auto& slice : tensor.slices) {
      for (auto begin = slice.range.begin; begin < slice.range.end; begin += piece_bytes / element) {
        files.read(tensor, Range{begin, begin + piece_bytes / element}.intersect(slice.range), piece.data());
      }
      verified.bytes += slice.range.size() * element;
      if (!files.has_checksums(tensor, slice)) verified.unchecked += slice.range.size() * element;
    }
  }
  return verified;
}

void CheckpointReader::check_records(int part, int parts) {
  files_->check_records(part, parts);
}

CheckpointReader open_checkpoint(const Group& group, const fs::path& path, bool verify) {
  std::string found;
  on_all_ranks(group, "checkpoint", [&] {
    if (group.rank() != 0) return;
    std::error_code error;
    if (fs::status(path, error).type() == fs::file_type::not_found) {
      throw CheckpointError(
          fmt::format("{}: no such file or folder; load_latest(), and --resume latest of shoal train, begin anew where "
                      "there is no checkpoint yet",
                      path.string()));
    }
    found = find_checkpoint(path);
  });
  found = broadcast_text(group, found, 0, {-1, -1, "checkpoint"});
  std::optional<CheckpointReader> reader;
  on_all_ranks(group, "checkpoint", [&] {
    const bool alone = group.size() == 1;
    reader.emplace(found, verify, /*whole_records=*/alone);
    if (verify && !alone) reader->check_records(group.rank(), group.size());
  });
  const auto own = digest_of(reader->index());
  const auto ends = group.all_reduce({own, -own}, ReduceOp::max, {-1, -1, "checkpoint"});
  if (ends[0] != -ends[1]) {
    throw CheckpointError(
        fmt::format("{}: ranks have read different ones: another job is saving to it, or ranks have other files there "
                    "(a relative path in another folder, a folder that is not shared)",
                    found));
  }
  return std::move(*reader);
}

}  // namespace shoal
