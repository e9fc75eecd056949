#pragma once
// Order in which gradients arrive: learnt in the first finished step, followed by buckets from the next one on.

#include <optional>
#include <vector>

#include "shoal/group.h"

namespace shoal {

class BucketOrder {
 public:
  struct Learnt {
    std::vector<size_t> order;
    int from = 0;  // the rank whose order counts
  };

  // follows: whether buckets follow any order.
  explicit BucketOrder(bool follows) : follows_(follows) {}

  // Of a finished step; only the first one's counts.
  void learn(const std::vector<size_t>& order, int from);
  // Whether it has been learnt, and buckets do not follow it yet.
  bool due() const { return due_; }
  // The order of the rank that counts, the same on all; it is not due any more. Gradients that have not arrived there
  // follow as registered, last first. Collective.
  const std::vector<size_t>& agree(const Group& group, size_t gradients, int64_t step);
  // Whether buckets have been built in it.
  bool followed() const { return followed_; }

  // None: nothing has been learnt, or buckets follow no order.
  std::optional<Learnt> learnt() const;
  // As if that had been learnt here, or nothing had. True: buckets that follow an order are to follow none.
  bool go_on_from(const std::optional<Learnt>& learnt);

 private:
  bool follows_;
  std::optional<Learnt> learnt_;
  bool due_ = false;
  bool followed_ = false;
};

}  // namespace shoal
