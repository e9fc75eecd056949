#include "checkpoint/pt/zip_directory.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <string_view>

#include "shoal/error.h"

namespace shoal {
namespace {

// Signatures, and sizes without names (APPNOTE.TXT of the format).
constexpr uint32_t end_mark = 0x06054b50;
constexpr uint32_t end64_locator_mark = 0x07064b50;
constexpr uint32_t end64_mark = 0x06064b50;
constexpr uint32_t entry_mark = 0x02014b50;
constexpr uint32_t local_mark = 0x04034b50;
constexpr int64_t end_bytes = 22;
constexpr int64_t end64_locator_bytes = 20;
constexpr int64_t end64_bytes = 56;
constexpr int64_t entry_bytes = 46;
constexpr int64_t local_bytes = 30;
constexpr int64_t longest_comment = 65535;
constexpr int64_t longest_directory = int64_t{64} << 20;

[[noreturn]] void refuse_zip(const InputFile& file, const std::string& what) {
  throw CheckpointError(fmt::format("{}: {}", file.path().string(), what));
}

template <class T>
T number_at(std::string_view bytes, size_t place) {
  T value{};
  std::memcpy(&value, bytes.data() + place, sizeof value);
  return value;
}

std::string bytes_at(const InputFile& file, int64_t offset, int64_t size) {
  if (offset < 0 || size > file.size() || offset > file.size() - size) refuse_zip(file, "a zip record beyond the file");
  std::string bytes(static_cast<size_t>(size), '\0');
  file.read(bytes.data(), size, offset);
  return bytes;
}

struct Extent {
  int64_t offset;
  int64_t size;
};

// Numbers of the format are unsigned; what does not fit a signed one lies beyond any file.
int64_t checked_place(const InputFile& file, uint64_t number) {
  if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
    refuse_zip(file, "a zip record beyond the file");
  return static_cast<int64_t>(number);
}

Extent find_directory(const InputFile& file) {
  const auto tail_size = std::min(file.size(), end_bytes + longest_comment);
  const auto tail_begin = file.size() - tail_size;
  const auto tail = bytes_at(file, tail_begin, tail_size);
  int64_t place = tail_size - end_bytes;
  while (place >= 0 && number_at<uint32_t>(tail, static_cast<size_t>(place)) != end_mark) --place;
  if (place < 0) refuse_zip(file, "a zip file that was cut short: it has no directory");
  const auto end = std::string_view(tail).substr(static_cast<size_t>(place));
  Extent extent{number_at<uint32_t>(end, 16), number_at<uint32_t>(end, 12)};
  const bool is64 =
      extent.offset == UINT32_MAX || extent.size == UINT32_MAX || number_at<uint16_t>(end, 10) == UINT16_MAX;
  if (!is64) return extent;
  const auto locator = bytes_at(file, tail_begin + place - end64_locator_bytes, end64_locator_bytes);
  if (number_at<uint32_t>(locator, 0) != end64_locator_mark) refuse_zip(file, "a zip file without its large directory");
  const auto end64 = bytes_at(file, checked_place(file, number_at<uint64_t>(locator, 8)), end64_bytes);
  if (number_at<uint32_t>(end64, 0) != end64_mark) refuse_zip(file, "a zip file without its large directory");
  return {checked_place(file, number_at<uint64_t>(end64, 48)), checked_place(file, number_at<uint64_t>(end64, 40))};
}

// What does not fit 32 bits is in a field of its own: of the size, the stored size and the offset those that do not.
void read_large(const InputFile& file, std::string_view extra, uint64_t& size, uint64_t& stored, uint64_t& offset) {
  constexpr uint16_t large = 1;
  while (extra.size() >= 4) {
    const auto length = std::min<size_t>(number_at<uint16_t>(extra, 2), extra.size() - 4);
    auto field = extra.substr(4, length);
    if (number_at<uint16_t>(extra, 0) == large) {
      for (auto* number : {&size, &stored, &offset}) {
        if (*number != UINT32_MAX) continue;
        if (field.size() < 8) refuse_zip(file, "a large zip record without its size");
        *number = number_at<uint64_t>(field, 0);
        field.remove_prefix(8);
      }
    }
    extra.remove_prefix(4 + length);
  }
}

}  // namespace

std::map<std::string, ZipRecord> zip_directory(const InputFile& file) {
  const auto extent = find_directory(file);
  if (extent.size > longest_directory) {
    refuse_zip(file, fmt::format("a zip directory of {} bytes; at most {} are read", extent.size, longest_directory));
  }
  const auto text = bytes_at(file, extent.offset, extent.size);
  std::map<std::string, ZipRecord> records;
  std::string_view rest = text;
  while (!rest.empty()) {
    if (rest.size() < entry_bytes || number_at<uint32_t>(rest, 0) != entry_mark)
      refuse_zip(file, "a damaged zip directory");
    const size_t name = number_at<uint16_t>(rest, 28);
    const size_t extra = number_at<uint16_t>(rest, 30);
    const size_t whole = entry_bytes + name + extra + number_at<uint16_t>(rest, 32);
    if (rest.size() < whole) refuse_zip(file, "a damaged zip directory");
    const std::string key(rest.substr(entry_bytes, name));
    uint64_t stored = number_at<uint32_t>(rest, 20);
    uint64_t size = number_at<uint32_t>(rest, 24);
    uint64_t offset = number_at<uint32_t>(rest, 42);
    read_large(file, rest.substr(entry_bytes + name, extra), size, stored, offset);
    const bool encrypted = (number_at<uint16_t>(rest, 8) & 1U) != 0;
    const bool plain = !encrypted && number_at<uint16_t>(rest, 10) == 0 && size == stored;
    const ZipRecord record{checked_place(file, offset), checked_place(file, size), plain,
                           number_at<uint32_t>(rest, 16)};
    if (!records.emplace(key, record).second) {
      refuse_zip(file, fmt::format("zip record {:.200} occurs twice", key));
    }
    rest.remove_prefix(whole);
  }
  return records;
}

int64_t zip_data(const InputFile& file, const std::string& name, const ZipRecord& record) {
  if (!record.plain) refuse_zip(file, fmt::format("zip record {:.200} is compressed or encrypted", name));
  const auto local = bytes_at(file, record.header, local_bytes);
  if (number_at<uint32_t>(local, 0) != local_mark)
    refuse_zip(file, fmt::format("zip record {:.200} is not there", name));
  const auto begin = record.header + local_bytes + number_at<uint16_t>(local, 26) + number_at<uint16_t>(local, 28);
  if (begin > file.size() || record.bytes > file.size() - begin) {
    refuse_zip(file, fmt::format("zip record {:.200} goes beyond the end of the file", name));
  }
  return begin;
}

bool is_zip(const InputFile& file) {
  uint32_t mark = 0;
  if (file.size() < static_cast<int64_t>(sizeof mark)) return false;
  file.read(&mark, sizeof mark, 0);
  return mark == local_mark;
}

}  // namespace shoal
