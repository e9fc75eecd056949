#pragma once
// Conversion of 16-bit floating-point numbers to and from float, singly and in rows. Only for reduce_blocks.cpp, which
// is compiled for several instruction sets: all functions are static, so that the linker cannot merge the copies.

#include <bit>
#include <cstdint>
#include <type_traits>
#ifdef __F16C__
#include <immintrin.h>
#endif

namespace shoal::kernels {

struct Half {
  uint16_t bits;
};
struct BFloat {
  uint16_t bits;
};

template <class To, class From>
static To bit_cast(From from) {
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

static float widen(BFloat value) {
  return bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

// The result is in the upper half of the word.
static uint32_t round_to_bfloat(float value) {
  const auto bits = bit_cast<uint32_t>(value);
  const uint32_t rounded = bits + 0x7fffU + ((bits >> 16) & 1U);
  return value != value ? 0x7fc00000U : rounded;
}
static BFloat narrow(float value) {
  return {static_cast<uint16_t>(round_to_bfloat(value) >> 16)};
}

// Rebases exponents by a multiplication, which also handles subnormal numbers.
static float widen(Half value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000U) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fffU) << 13;
  const auto rebased = bit_cast<uint32_t>(bit_cast<float>(magnitude) * 0x1p112F);
  const uint32_t special = magnitude >= 0x0f800000U ? 0x7f800000U : 0U;  // infinities and NaN
  return bit_cast<float>(sign | rebased | special);
}

static Half narrow_to(float value, Half*) {
  const auto bits = bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000U;
  const uint32_t magnitude = bits & 0x7fffffffU;
  uint32_t result = 0;
  if (magnitude > 0x7f800000U) {
    result = 0x7e00U;
  } else if (magnitude >= 0x477ff000U) {  // rounds beyond 65504
    result = 0x7c00U;
  } else if (magnitude < 0x38800000U) {  // subnormal: let the addition round at the right bit
    result = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5F) - 0x3f000000U;
  } else {
    result = (magnitude - 0x38000000U + 0xfffU + ((magnitude >> 13) & 1U)) >> 13;
  }
  return {static_cast<uint16_t>(sign | result)};
}

// Plain types are not converted.
template <class T>
requires std::is_arithmetic_v<T>
static T widen(T value) {
  return value;
}
template <class T>
static T narrow_to(T value, T*) {
  return value;
}

template <class T, class Wide>
static void load(const T* from, Wide* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = widen(from[i]);
}
template <class T, class Wide>
static void store(const Wide* from, T* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = narrow_to(from[i], static_cast<T*>(nullptr));
}

// The two numbers of a word go to the two halves of the row, which all operations treat the same way: vectors need no
// shuffling, which takes half of the time.
static_assert(std::endian::native == std::endian::little);

static uint32_t two_at(const BFloat* from) {
  uint32_t two;
  __builtin_memcpy(&two, from, sizeof two);
  return two;
}
static float widen_low(uint32_t two) {
  return bit_cast<float>(two << 16);
}
static float widen_high(uint32_t two) {
  return bit_cast<float>(two & 0xffff0000U);
}
static void narrow_two_to(float low, float high, BFloat* to) {
  const uint32_t two = (round_to_bfloat(low) >> 16) | (round_to_bfloat(high) & 0xffff0000U);
  __builtin_memcpy(to, &two, sizeof two);
}

static void load(const BFloat* from, float* to, int64_t count) {
  const int64_t half = count / 2;
  for (int64_t i = 0; i < half; ++i) {
    const uint32_t two = two_at(from + 2 * i);
    to[i] = widen_low(two);
    to[half + i] = widen_high(two);
  }
  if (count % 2 != 0) to[count - 1] = widen(from[count - 1]);
}
static void store(const float* from, BFloat* to, int64_t count) {
  const int64_t half = count / 2;
  for (int64_t i = 0; i < half; ++i) narrow_two_to(from[i], from[half + i], to + 2 * i);
  if (count % 2 != 0) to[count - 1] = narrow(from[count - 1]);
}

#ifdef __F16C__
static void load(const Half* from, float* to, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
  for (; i < count; ++i) to[i] = widen(from[i]);
}
static void store(const float* from, Half* to, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
  }
  for (; i < count; ++i) to[i] = narrow_to(from[i], static_cast<Half*>(nullptr));
}
#endif

}  // namespace shoal::kernels
