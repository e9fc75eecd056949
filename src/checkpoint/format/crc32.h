#pragma once
// The checksum of checkpoints: CRC-32 as in gzip, so that any language's standard library can check it.

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace shoal {

// Of `size` bytes that follow those whose checksum is `before`. Finds every change within 32 neighbouring bits. About
// as fast as memory where the processor multiplies without carries, else zlib's.
uint32_t crc32(const void* data, size_t size, uint32_t before = 0);

// One checksum per `block` bytes of a stream that comes in pieces of any size.
class BlockChecksums {
 public:
  explicit BlockChecksums(size_t block) : block_(block) {}
  void add(const void* data, size_t size);
  std::vector<uint32_t> take() { return std::move(checksums_); }

 private:
  size_t block_;
  size_t filled_ = 0;  // bytes of the last block
  std::vector<uint32_t> checksums_;
};

}  // namespace shoal
