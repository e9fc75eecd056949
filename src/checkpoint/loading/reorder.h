#pragma once
// Conversion of elements from one order of dimensions to another.

#include <cstdint>
#include <functional>
#include <vector>

#include "shoal/detail/range.h"

namespace shoal {

using Order = std::vector<int64_t>;  // dimensions, the slowest first; empty: row-major

// Whether both orders count elements alike.
bool same_order(const Order& a, const Order& b);

// Fills `to` with the elements `range`, counted in order `wanted`, of a tensor of which `read` returns ranges counted
// in order `stored`. Reads ascending pieces between the first and the last element needed, extended to whole blocks of
// the dimensions after those in which both orders agree; for channels-last and row-major weights these are whole
// filters. Memory: one piece.
void read_reordered(const std::vector<int64_t>& shape, const Order& stored, const Order& wanted, const Range& range,
                    int64_t element_bytes, char* to, const std::function<void(const Range&, char* to)>& read);

}  // namespace shoal
