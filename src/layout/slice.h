#pragma once
// Slice: part of one parameter, and its place in a flat buffer.

#include <cstddef>

#include "shoal/detail/range.h"

namespace shoal {

struct Slice {
  size_t piece = 0;  // index of the parameter in its FlatLayout
  Range in_piece;    // elements of the parameter, row-major
  Range in_flat;     // the same elements in the flat buffer; equal size
  bool operator==(const Slice&) const = default;
};

}  // namespace shoal
