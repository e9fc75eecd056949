#pragma once
// Order of buckets: learnt from the arrival of gradients in the first finished step, followed from the next one on.

#include <optional>
#include <vector>

#include "shoal/group.h"

namespace shoal {

class BucketOrder {
 public:
  struct Learnt {
    std::vector<size_t> order;
    int from = 0;  // rank whose order counts
  };

  // follows: whether buckets follow the order of arrival at all.
  explicit BucketOrder(bool follows) : follows_(follows) {}

  // Records the order of a finished step; only the first call counts.
  void learn(const std::vector<size_t>& order, int from);
  // Whether an order was learnt that buckets do not follow yet.
  bool due() const { return due_; }
  // Broadcasts the learnt order of the rank that counts, and is not due afterwards. Gradients that did not arrive there
  // come last, in reverse order of registration. Collective.
  const std::vector<size_t>& agree(const Group& group, size_t gradients, int64_t step);
  // Whether buckets were rebuilt in the learnt order.
  bool followed() const { return followed_; }

  // Nothing if no order was learnt or buckets follow none.
  std::optional<Learnt> learnt() const;
  // Replaces the learnt order (none: forgets it). True if buckets that follow an order must be rebuilt as registered.
  bool resume_from(const std::optional<Learnt>& learnt);

 private:
  bool follows_;
  std::optional<Learnt> learnt_;
  bool due_ = false;
  bool followed_ = false;
};

}  // namespace shoal
