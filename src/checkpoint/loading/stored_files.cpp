#include "checkpoint/loading/stored_files.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/printable.h"
#include "checkpoint/format/crc32.h"
#include "checkpoint/saving/pieces.h"
#include "shoal/error.h"

namespace shoal {

StoredFiles::StoredFiles(std::filesystem::path folder, const CheckpointIndex& index, bool verify, bool whole_records)
    : folder_(std::move(folder)), index_(index), verify_(verify), whole_records_(verify && whole_records) {}

const SafetensorsReader& StoredFiles::file(const std::string& name) {
  constexpr size_t most_open = 64;
  const auto found = open_.find(name);
  if (found != open_.end()) return *found->second;
  if (open_.size() >= most_open) open_.clear();
  auto reader = std::make_unique<SafetensorsReader>(folder_ / name);
  if (reader->file().size() != index_.files.at(name)) {
    throw CheckpointError(fmt::format("{} has {} bytes; it was written with {}", reader->file().path().string(),
                                      reader->file().size(), index_.files.at(name)));
  }
  return *open_.emplace(name, std::move(reader)).first->second;
}

StoredFiles::Place& StoredFiles::place(const StoredTensor& tensor, const StoredSlice& slice) {
  const auto found = places_.find(&slice);
  if (found != places_.end()) return found->second;
  const auto& reader = file(slice.file);
  const auto& entry = reader.entry(slice_key(tensor, slice.range));
  const auto shape = slice_shape(tensor, slice.range);
  if (entry.dtype->type != tensor.dtype || entry.shape != shape) {
    throw CheckpointError(fmt::format("{}: {} is {} [{}]; the index says {} [{}]", reader.file().path().string(),
                                      slice_key(tensor, slice.range), entry.dtype->name, fmt::join(entry.shape, ", "),
                                      find_safetensors_dtype(tensor.dtype)->name, fmt::join(shape, ", ")));
  }
  if (whole_records_ && entry.record) check_record(tensor, reader.file(), *entry.record);
  return places_
      .emplace(&slice, Place{entry.offset, entry.bytes, std::vector<bool>(verify_ ? slice.checksums.size() : 0)})
      .first->second;
}

bool StoredFiles::has_checksums(const StoredTensor& tensor, const StoredSlice& slice) {
  return !slice.checksums.empty() || slice.range.size() == 0 ||
         file(slice.file).entry(slice_key(tensor, slice.range)).record.has_value();
}

void StoredFiles::check_records(int part, int parts) {
  // A .pt file is the only one. Of several, each rank opens those that it reads.
  if (index_.files.size() != 1) return;
  std::set<int64_t> seen;  // tensors may share a record
  std::vector<int64_t> bytes(static_cast<size_t>(parts));
  for (const auto& [name, tensor] : index_.tensors) {
    if (tensor.dtype == at::ScalarType::Undefined) continue;
    for (const auto& slice : tensor.slices) {
      const auto& reader = file(slice.file);
      const auto& record = reader.entry(slice_key(tensor, slice.range)).record;
      if (!record || !seen.insert(record->offset).second) continue;
      const auto least = std::min_element(bytes.begin(), bytes.end());
      *least += record->bytes;
      if (least - bytes.begin() == part) check_record(tensor, reader.file(), *record);
    }
  }
}

void StoredFiles::check_record(const StoredTensor& tensor, const InputFile& input, const ChecksummedBytes& record) {
  const auto key = std::pair(input.path(), record.offset);
  if (checked_.contains(key)) return;
  uint32_t found = 0;
  for (int64_t begin = 0; begin < record.bytes; begin += piece_bytes) {
    block_.resize(piece_bytes);
    const auto size = std::min(piece_bytes, record.bytes - begin);
    input.expect(std::min(2 * piece_bytes, record.bytes - begin), record.offset + begin);
    input.read(block_.data(), size, record.offset + begin);
    found = crc32(block_.data(), static_cast<size_t>(size), found);
  }
  if (found != record.checksum) {
    throw CheckpointError(fmt::format("{} is damaged: the storage of tensor {} has checksum {:08x}, saved was {:08x}",
                                      input.path().string(), printable(tensor.name), found, record.checksum));
  }
  checked_.insert(key);
}

void StoredFiles::check(const StoredTensor& tensor, const StoredSlice& slice, int64_t block, const char* data,
                        int64_t size) const {
  const auto found = crc32(data, static_cast<size_t>(size));
  if (found == slice.checksums[block]) return;
  const auto element = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  const auto begin = slice.range.begin + block * piece_bytes / element;
  throw CheckpointError(fmt::format("{} is damaged: elements {}:{} of tensor {} have checksum {:08x}, saved was {:08x}",
                                    (folder_ / slice.file).string(), begin, begin + size / element, tensor.name, found,
                                    slice.checksums[block]));
}

void StoredFiles::read_slice(const StoredTensor& tensor, const StoredSlice& slice, int64_t begin, int64_t end,
                             char* to) {
  auto& place = this->place(tensor, slice);
  const auto& input = file(slice.file).file();
  // Prefetches a few pieces, so that the disk works while checksums are computed. Pages read soon after they arrive
  // cost a third of those read 16 pieces later (measured in a virtual machine).
  constexpr int64_t ahead = 4 * piece_bytes;
  auto expected = begin;
  while (begin < end) {
    for (; expected < std::min(begin + ahead, end); expected += piece_bytes) {
      input.expect(std::min(piece_bytes, end - expected), place.offset + expected);
    }
    const auto block = begin / piece_bytes;
    const auto block_begin = block * piece_bytes;
    const auto block_size = std::min(piece_bytes, place.bytes - block_begin);
    const auto size = std::min(end, block_begin + block_size) - begin;
    if (place.verified.empty() || place.verified[block]) {
      input.read(to, size, place.offset + begin);
    } else if (size == block_size) {
      input.read(to, size, place.offset + begin);
      check(tensor, slice, block, to, size);
      place.verified[block] = true;
    } else {
      block_.resize(piece_bytes);
      input.read(block_.data(), block_size, place.offset + block_begin);
      check(tensor, slice, block, block_.data(), block_size);
      place.verified[block] = true;
      std::copy_n(block_.data() + (begin - block_begin), size, to);
    }
    begin += size;
    to += size;
  }
}

void StoredFiles::read(const StoredTensor& tensor, const Range& range, char* to) {
  const auto element = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  auto slice = std::upper_bound(tensor.slices.begin(), tensor.slices.end(), range.begin,
                                [](int64_t begin, const StoredSlice& s) { return begin < s.range.end; });
  for (; slice != tensor.slices.end() && slice->range.begin < range.end; ++slice) {
    const auto common = range.intersect(slice->range);
    const auto in_slice = common.begin - slice->range.begin;
    read_slice(tensor, *slice, in_slice * element, (in_slice + common.size()) * element,
               to + (common.begin - range.begin) * element);
  }
}

}  // namespace shoal
