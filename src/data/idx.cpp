#include "data/idx.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <vector>

#include "data/file_bytes.h"
#include "shoal/base/error.h"

namespace shoal::data {
namespace {

uint32_t big_endian(const uint8_t* bytes) {
  return uint32_t{bytes[0]} << 24 | uint32_t{bytes[1]} << 16 | uint32_t{bytes[2]} << 8 | uint32_t{bytes[3]};
}

}  // namespace

at::Tensor read_idx(const std::filesystem::path& file, int64_t dimensions) {
  const auto fail = [&](const std::string& problem) {
    throw UsageError(fmt::format("{}: {}", file.string(), problem));
  };
  constexpr size_t word = 4;
  constexpr uint32_t unsigned_byte = 0x08;
  const auto bytes = read_file(file);
  const size_t header = word * (1 + dimensions);
  if (bytes.size() < word) fail(fmt::format("truncated: {} bytes, too short for an IDX file", bytes.size()));
  const uint32_t magic = unsigned_byte << 8 | static_cast<uint32_t>(dimensions);
  if (big_endian(bytes.data()) != magic) {
    fail(fmt::format("not an IDX file of bytes in {} dimensions: the magic number is {:#010x} instead of {:#010x}",
                     dimensions, big_endian(bytes.data()), magic));
  }
  if (bytes.size() < header) fail(fmt::format("truncated: {} bytes, the header has {}", bytes.size(), header));

  std::vector<int64_t> sizes;
  // In floating point, since the product of damaged sizes may exceed any integer.
  double announced = 1;
  for (int64_t i = 1; i <= dimensions; ++i) {
    sizes.push_back(big_endian(bytes.data() + word * i));
    announced *= static_cast<double>(sizes.back());
  }
  const size_t present = bytes.size() - header;
  if (announced != static_cast<double>(present)) {
    fail(fmt::format("{}: the header announces {} = {:.0f} bytes, the file has {}",
                     announced > static_cast<double>(present) ? "truncated" : "too long", fmt::join(sizes, " x "),
                     announced, present));
  }
  auto result = at::empty(sizes, at::kByte);
  std::copy(bytes.begin() + static_cast<std::ptrdiff_t>(header), bytes.end(), result.mutable_data_ptr<uint8_t>());
  return result;
}

}  // namespace shoal::data
