#pragma once
// Buffer that exists once per host, for data that all ranks need in full, such as parameters.

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "shoal/detail/call.h"
#include "shoal/detail/range.h"

namespace shoal {

class Group;

struct HostSharedBufferOptions {
  // Without shared memory: elements per broadcast; -1: the whole range of an owner.
  int64_t broadcast_numel = -1;
  // dtype to which publish() rounds the owner's range, and in which it is sent; none: the dtype of the buffer.
  std::optional<at::ScalarType> published_as{};
};

// Buffer of which every rank owns a range that only it writes. If the ranks of the group share memory, there is one
// copy: writes are visible to all ranks, and an all-gather reduces to waiting until the owners have published.
// Otherwise every rank has a copy, and publish() broadcasts the owner's range.
//
// The caller must follow two rules. An owner writes its range only after all ranks have stopped reading the previous
// version, for example after a reduction of the gradients computed from it. A reader waits for the version that it
// needs. Copies of the handle refer to the same buffer; the memory lives as long as a handle or the tensor. Not
// thread-safe.
class HostSharedBuffer {
 public:
  // All elements, [numel]; initially zero.
  const at::Tensor& tensor() const;
  // Owned ranges, by rank of the group.
  const std::vector<Range>& owners() const;
  // View of the elements of tensor() that this rank owns.
  at::Tensor own() const;
  // True if the ranks of the group share one copy.
  bool shared() const;

  // Publishes this rank's range as `version`, which must be larger than the previous one (at least 1 at first). Without
  // shared memory it starts a broadcast, so all ranks must publish the same versions in the same order.
  void publish(int64_t version, const Label& label = {});
  // Blocks until the owners of `range` (default: all owners) have published `version`. Without shared memory it waits
  // for all owners in either case. Throws like Work::wait.
  void wait_published(int64_t version, const Label& label = {});
  void wait_published(int64_t version, const Range& range, const Label& label = {});

  struct State;

 private:
  friend class Group;
  explicit HostSharedBuffer(std::shared_ptr<State> state);
  std::shared_ptr<State> state_;
};

}  // namespace shoal
