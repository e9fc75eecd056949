#pragma once
// Checksum of checkpoints: CRC-32 as in gzip, which the standard library of any language can verify.

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace shoal {

// CRC of `size` bytes that follow bytes with the CRC `before`. Detects every change within 32 neighbouring bits. About
// as fast as memory on processors with carry-less multiplication; else zlib's speed.
uint32_t crc32(const void* data, size_t size, uint32_t before = 0);

// One checksum per `block` bytes of a stream that arrives in pieces of any size.
class BlockChecksums {
 public:
  explicit BlockChecksums(size_t block) : block_(block) {}
  void add(const void* data, size_t size);
  std::vector<uint32_t> take() { return std::move(checksums_); }

 private:
  size_t block_;
  size_t filled_ = 0;  // bytes in the last block
  std::vector<uint32_t> checksums_;
};

}  // namespace shoal
