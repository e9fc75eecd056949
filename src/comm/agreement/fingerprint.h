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

// Description of a call that ranks compare before any data are changed.
struct Fingerprint {
  uint64_t number;  // number of the operation in the group, from 1
  int32_t op;
  int32_t reduce;
  int32_t dtype;
  int32_t peer;  // root, or -1
  uint64_t bytes;
  int64_t step;
  int64_t bucket;
  uint64_t label;         // hash of the label's text
  char text[text_bytes];  // beginning of the label's text
};

Fingerprint fingerprint_of(const Call& call, uint64_t number);
// Hash of the parts that ranks must have in common; other calls hardly ever get the same number.
uint64_t hash_of(const Fingerprint& print);
// Whether ranks may make these calls together.
bool same(const Fingerprint& a, const Fingerprint& b);
// Whether operation, reduction and dtype exist; false for data that another program wrote.
bool is_call(const Fingerprint& print);
// The call in words. Only for fingerprints for which is_call() holds.
std::string describe(const Fingerprint& print);
// A sentence that names two ranks (by `world_ranks`) and their calls, if the calls differ. prints: in rank order. Every
// rank gets the same sentence.
std::optional<std::string> find_difference(const std::vector<const Fingerprint*>& prints,
                                           const std::vector<int>& world_ranks);

}  // namespace shoal
