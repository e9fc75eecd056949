#pragma once
// Sums of gradients that second owners get.

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "engine/reducer/reducer.h"
#include "engine/sharded/second_owner_check.h"
#include "shoal/group.h"

namespace shoal {

// Sums of gradients of which this rank is the second owner. The first owner sends its sum of a bucket once the bucket
// is reduced, while backward computes the next ones. What changes a sum later is noticed by its tensor's version; then
// complete() sends all sums again.
class SecondCopies : public std::enable_shared_from_this<SecondCopies> {
 public:
  struct Copy {
    int owner = 0;   // the first one, a rank of the reducer's group
    Range range{};   // of the bucket's payload
    at::Tensor sum;  // its elements
  };

  // reducer: must outlive this object. Its ranks own ranges of buckets, and sum in one stage. Where it has built its
  // buckets anew, the first message in them finds copies that are made anew.
  explicit SecondCopies(const Reducer& reducer);
  SecondCopies(const SecondCopies&) = delete;
  SecondCopies& operator=(const SecondCopies&) = delete;

  // Whether the copies are those of the reducer's present buckets. A forward may rebuild the buckets; the first message
  // makes new copies.
  bool of_these_buckets() const { return built_ == reducer_.buckets().builds(); }
  const std::vector<Copy>& of(size_t bucket) const { return copies_[bucket]; }
  // Chains the messages about a bucket to its reduction, which keeps this object.
  PendingExchange follow(PendingExchange sum, size_t bucket, const Label& label);
  // All copies are as the sums are at present, and all ranks have passed the check. Collective.
  void complete(SecondOwnerCheck check);
  // Runs `change`, which does the same to this rank's sums and to its copies.
  void change_alike(const std::function<void()>& change);

 private:
  PendingExchange exchange(size_t bucket, const Label& label);
  bool is_current(size_t bucket) const;
  void make();

  const Reducer& reducer_;
  Group group_;
  std::vector<int> owners_;                // by rank, of what it owns: choose_second_owners()
  std::vector<std::vector<Copy>> copies_;  // by bucket
  std::vector<uint32_t> sent_;             // by bucket: version of this rank's sum that its holder has
  int64_t built_ = 0;                      // builds of the reducer's buckets then
};

}  // namespace shoal
