#pragma once
// A part of one parameter, and where it lies in flat memory.

#include <cstddef>

#include "shoal/detail/range.h"

namespace shoal {

struct Slice {
  size_t piece = 0;  // number of the parameter in its FlatLayout
  Range in_piece;    // elements of the parameter, row-major
  Range in_flat;     // the same elements in the flat buffer; equal size
  bool operator==(const Slice&) const = default;
};

}  // namespace shoal
