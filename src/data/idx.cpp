#include "data/idx.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>
#include <vector>

#include "data/file_bytes.h"

namespace shoal::data {
namespace {

uint32_t big_endian(const uint8_t* bytes) {
  return uint32_t{bytes[0]} << 24 | uint32_t{bytes[1]} << 16 | uint32_t{bytes[2]} << 8 | uint32_t{bytes[3]};
}

}  // namespace

at::Tensor read_idx(const std::filesystem::path& path, int64_t dimensions) {
  constexpr int64_t word = 4;
  constexpr uint32_t unsigned_byte = 0x08;
  FileBytes file(path);
  std::vector<uint8_t> header(static_cast<size_t>(word * (1 + dimensions)));
  const auto length = static_cast<int64_t>(header.size());
  const auto found = file.read(header.data(), length);
  if (found < word) file.fail(fmt::format("truncated: {} bytes, too short for an IDX file", found));
  const uint32_t magic = unsigned_byte << 8 | static_cast<uint32_t>(dimensions);
  if (big_endian(header.data()) != magic) {
    file.fail(fmt::format("not an IDX file of bytes in {} dimensions: the magic number is {:#010x} instead of {:#010x}",
                          dimensions, big_endian(header.data()), magic));
  }
  if (found < length) file.fail(fmt::format("truncated: {} bytes, the header has {}", found, length));

  std::vector<int64_t> sizes;
  // Floating point, because the product of corrupt sizes may overflow any integer.
  double announced = 1;
  for (int64_t i = 1; i <= dimensions; ++i) {
    sizes.push_back(big_endian(header.data() + word * i));
    announced *= static_cast<double>(sizes.back());
  }
  if (announced > static_cast<double>(file.most())) {
    file.fail(fmt::format("truncated: the header announces {} = {:.0f} bytes, a file of its size holds at most {}",
                          fmt::join(sizes, " x "), announced, file.most()));
  }
  at::Tensor result;
  try {
    result = at::empty(sizes, at::kByte);
  } catch (const c10::Error&) {
    file.fail(fmt::format("no memory for {} = {:.0f} bytes", fmt::join(sizes, " x "), announced));
  }
  const auto wanted = static_cast<int64_t>(announced);
  const auto present = file.read(result.mutable_data_ptr<uint8_t>(), wanted);
  // Reads beyond the expected end, too: only there a gzip file's checksum is compared.
  uint8_t further = 0;
  const bool longer = file.read(&further, 1) > 0;
  if (present < wanted || longer) {
    file.fail(fmt::format("{}: the header announces {} = {} bytes, the file has {}", longer ? "too long" : "truncated",
                          fmt::join(sizes, " x "), wanted, longer ? "more" : std::to_string(present)));
  }
  return result;
}

}  // namespace shoal::data
