#pragma once
// Elements counted in one order of dimensions, brought into another.

#include <cstdint>
#include <functional>
#include <vector>

#include "shoal/detail/range.h"

namespace shoal {

using Order = std::vector<int64_t>;  // dimensions, the slowest first; empty: row-major

// Whether both count alike.
bool same_order(const Order& a, const Order& b);

// Fills `to` with the elements `range`, counted in order `wanted`, of a tensor of which `read` gives any range counted
// in order `stored`. Reads, in pieces and ascending, the range between the first and the last element that are needed,
// extended to whole blocks of the dimensions behind those in which both orders agree: for channels-last and row-major
// weights to whole filters. Memory: one piece.
void read_reordered(const std::vector<int64_t>& shape, const Order& stored, const Order& wanted, const Range& range,
                    int64_t element_bytes, char* to, const std::function<void(const Range&, char* to)>& read);

}  // namespace shoal
