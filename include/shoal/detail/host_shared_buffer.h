#pragma once
// One copy per host of what all ranks need in full, such as the parameters (BEY17).

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "shoal/detail/call.h"
#include "shoal/detail/range.h"

namespace shoal {

class Group;

struct OnceBufferOptions {
  // Where memory is not shared: elements in one broadcast; -1: an owner's whole range.
  int64_t broadcast_numel = -1;
  // What publishing rounds the owner's range to, and what it travels as; none: the buffer's dtype.
  std::optional<at::ScalarType> published_as{};
};

// Every rank owns a range and is the only one that writes it. Where the group's ranks share memory there is one copy: a
// write is seen by all at once, and gathering the whole is nothing but waiting until the owners have said that they are
// done. Elsewhere every rank has its own copy, and publishing moves the ranges.
//
// The caller keeps two rules: an owner writes its range only when no rank reads the previous version any more (a
// reduction of the gradients made from it is such a moment), and a reader waits for the version that it needs.
// Cheap handle; move and copy mean the same buffer. One thread at a time. Lives as long as a handle or the tensor.
class OnceBuffer {
 public:
  // All elements, [numel]; zeroes at first.
  const at::Tensor& tensor() const;
  // By rank of the group.
  const std::vector<Range>& owners() const;
  // The part of tensor() that this rank owns.
  at::Tensor own() const;
  // Whether the ranks of the group share one copy.
  bool shared() const;

  // This rank's range now holds `version`, which must be larger than the last one (the first: at least 1). Without
  // shared memory it starts to send the range to the others, so all ranks publish the same versions in the same order.
  void publish(int64_t version, const Label& label = {});
  // Blocks until the owners of `range` (default: of everything) have published `version`. Errors as Work::wait; without
  // shared memory, for every range at once.
  void wait_published(int64_t version, const Label& label = {});
  void wait_published(int64_t version, const Range& range, const Label& label = {});

  struct State;

 private:
  friend class Group;
  explicit OnceBuffer(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
};

}  // namespace shoal
