#pragma once
// Counter-based integer hash (splitmix64) for the reference runs' parameters and data.
//
// All functions are pure functions of integers, so that programs in other languages reproduce the numbers bit for bit.

#include <cstdint>

namespace shoal::models {

// Second argument of key(): the use of the numbers.
enum class Purpose : uint64_t { parameter = 1, sample = 2, label_template = 3, probe = 4 };

constexpr uint64_t mix(uint64_t x) {
  uint64_t z = x + 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// Combines integers into the key of a stream.
template <class... Numbers>
constexpr uint64_t key(Numbers... numbers) {
  uint64_t h = 0;
  ((h = mix(h ^ static_cast<uint64_t>(numbers))), ...);
  return h;
}

// Element `i` of stream `k`.
constexpr uint64_t draw(uint64_t k, uint64_t i) {
  return mix(k + i);
}

// Maps a hash to [-1, 1), exact in float32.
constexpr float unit(uint64_t h) {
  return static_cast<float>(static_cast<int64_t>(h >> 40) - (int64_t{1} << 23)) * 0x1p-23f;
}

}  // namespace shoal::models
