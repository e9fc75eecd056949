#pragma once
// Layout of parameters in a flat buffer. Plain arithmetic: no tensors, no communication.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "layout/slice.h"
#include "shoal/detail/range.h"

namespace shoal {

// Pieces lie in the given order, each aligned (by default to 128 bytes: whole cache-line pairs and the widest vector
// loads); the gaps are padding. The buffer is padded so that it splits into `parts` equal parts that are aligned as
// well. Immutable.
class FlatLayout {
 public:
  // numels: elements of each piece; zero is allowed. element_bytes: of the buffer's dtype. alignment_bytes: a multiple
  // of element_bytes. UsageError for other values.
  FlatLayout(std::span<const int64_t> numels, size_t element_bytes, int64_t alignment_bytes = 128, int parts = 1);

  size_t pieces() const { return ranges_.size(); }
  const Range& range(size_t piece) const { return ranges_.at(piece); }
  int64_t size() const { return size_; }    // elements of the buffer, including padding
  int64_t numel() const { return numel_; }  // elements of the pieces
  int64_t bytes() const { return size_ * static_cast<int64_t>(element_bytes_); }
  size_t element_bytes() const { return element_bytes_; }
  int parts() const { return parts_; }
  Range part(int index) const;  // the index-th of parts() equal ranges of the buffer

  // The parts of pieces within `flat`, in order, without gaps, padding and empty pieces.
  std::vector<Slice> overlapping(const Range& flat) const;

 private:
  size_t element_bytes_;
  int parts_;
  std::vector<Range> ranges_;
  int64_t numel_ = 0;
  int64_t size_ = 0;
};

}  // namespace shoal
