#include "checkpoint/format/crc32.h"

#include <zlib.h>

#include <algorithm>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace shoal {
namespace {

uint32_t plain(const void* data, size_t size, uint32_t before) {
  return static_cast<uint32_t>(crc32_z(before, static_cast<const Bytef*>(data), size));
}

#if defined(__x86_64__)

// x^exponent modulo the polynomial, bit-reversed like the data, and shifted by one because the product of two reversed
// numbers is off by one bit.
constexpr uint64_t power(int exponent) {
  uint32_t remainder = 1;
  for (int i = 0; i < exponent; ++i) remainder = (remainder << 1) ^ ((remainder >> 31) != 0 ? 0x04C11DB7U : 0U);
  uint64_t reversed = 0;
  for (int bit = 0; bit < 32; ++bit) reversed |= static_cast<uint64_t>((remainder >> bit) & 1) << (31 - bit);
  return reversed << 1;
}

// Moves 16 bytes `bits` ahead in the message: multiplies them by x^bits modulo the polynomial (Gopal et al., "Fast CRC
// Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009).
template <int bits>
__attribute__((target("pclmul,sse4.1"))) __m128i ahead(__m128i value) {
  constexpr auto far = static_cast<int64_t>(power(bits + 32)), near = static_cast<int64_t>(power(bits - 32));
  const auto factors = _mm_set_epi64x(near, far);
  return _mm_xor_si128(_mm_clmulepi64_si128(value, factors, 0x00), _mm_clmulepi64_si128(value, factors, 0x11));
}

// Folds the message to 16 bytes with the same remainder, which zlib finishes.
__attribute__((target("pclmul,sse4.1"))) uint32_t folded(const unsigned char* data, size_t size, uint32_t before) {
  constexpr size_t lane = 16;
  constexpr size_t stride = 4 * lane;
  const auto load = [](const unsigned char* from) __attribute__((target("pclmul,sse4.1"))) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  };
  __m128i lanes[4];
  for (size_t i = 0; i < 4; ++i) lanes[i] = load(data + i * lane);
  lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(static_cast<int>(~before)));
  for (data += stride, size -= stride; size >= stride; data += stride, size -= stride) {
    for (size_t i = 0; i < 4; ++i) lanes[i] = _mm_xor_si128(ahead<8 * stride>(lanes[i]), load(data + i * lane));
  }
  __m128i sum = lanes[0];
  for (size_t i = 1; i < 4; ++i) sum = _mm_xor_si128(ahead<8 * lane>(sum), lanes[i]);
  alignas(16) unsigned char rest[lane];
  _mm_store_si128(reinterpret_cast<__m128i*>(rest), sum);
  return plain(data, size, plain(rest, lane, ~0U));  // ~0: an empty register, because its contents are in the lanes
}

bool can_fold() {
  static const bool can = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  return can;
}

#endif

}  // namespace

uint32_t crc32(const void* data, size_t size, uint32_t before) {
#if defined(__x86_64__)
  constexpr size_t worth_it = 128;
  if (size >= worth_it && can_fold()) return folded(static_cast<const unsigned char*>(data), size, before);
#endif
  return plain(data, size, before);
}

void BlockChecksums::add(const void* data, size_t size) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  while (size > 0) {
    if (checksums_.empty() || filled_ == block_) {
      checksums_.push_back(0);
      filled_ = 0;
    }
    const auto part = std::min(size, block_ - filled_);
    checksums_.back() = crc32(bytes, part, checksums_.back());
    filled_ += part;
    bytes += part;
    size -= part;
  }
}

}  // namespace shoal
