#pragma once
// Fingerprint of an operation, which ranks compare before any data are changed.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "shoal/detail/call.h"

namespace shoal {

constexpr size_t text_bytes = 96;

// What a rank has called; compared between ranks before anybody's data are touched.
struct Fingerprint {
  uint64_t number;  // of the operation in the group, from 1
  int32_t op;
  int32_t reduce;
  int32_t dtype;
  int32_t peer;  // root, or -1
  uint64_t bytes;
  int64_t step;
  int64_t bucket;
  uint64_t label;         // hash of the text
  char text[text_bytes];  // its beginning
};

Fingerprint fingerprint_of(const Call& call, uint64_t number);
// The same number for calls that ranks may make together, and hardly ever for others.
uint64_t hash_of(const Fingerprint& print);
// Whether ranks may call these together.
bool same(const Fingerprint& a, const Fingerprint& b);
// Whether the library has such an operation, reduction and dtype: not so where somebody else has written it.
bool is_call(const Fingerprint& print);
// The call in words, from a peer's fingerprint, for which is_call() holds.
std::string describe(const Fingerprint& print);
// What the ranks have called when that is not the same: a sentence that names two ranks (by `world_ranks`) and both
// calls. `prints`: in rank order. Every rank that asks gets the same answer.
std::optional<std::string> find_difference(const std::vector<const Fingerprint*>& prints,
                                           const std::vector<int>& world_ranks);

}  // namespace shoal
