#pragma once
// Second owners of shards, for elastic jobs whose ranks share no memory, and what they get of gradients.

#include <functional>
#include <map>
#include <vector>

#include "engine/reducer/reducer.h"
#include "shoal/group.h"

namespace shoal {

// By rank, the rank that owns the same a second time: the one at its place on the next host, counted round where that has fewer
// ranks; with one host, the next rank. hosts: by rank, as returned by hosts_of(). Several ranks at least.
std::vector<int> second_owners(const std::vector<int>& hosts);

// DisagreeError: some ranks have not updated in a step in which others have.
[[noreturn]] void refuse_unequal_updates();

// Sums of gradients that this rank holds a second time. An owner sends its sum of a bucket once the bucket is reduced, while backward
// computes the next ones. What changes a sum later is noticed by its tensor's version; then complete() sends all sums again.
class SecondCopies {
 public:
  struct Copy {
    int owner = 0;   // the first one, a rank of the reducer's group
    Range range{};   // of the bucket's payload
    at::Tensor sum;  // its elements
  };

  // reducer: must outlive this object. Its ranks own ranges of buckets, and sum in one stage.
  explicit SecondCopies(const Reducer& reducer);
  SecondCopies(const SecondCopies&) = delete;
  SecondCopies& operator=(const SecondCopies&) = delete;

  const std::vector<Copy>& of(size_t bucket) const { return copies_[bucket]; }
  // Chains the messages about a bucket to its reduction.
  PendingExchange follow(PendingExchange sum, size_t bucket, const Label& label);
  // All copies are as the sums are at present. values: by first owner, digest of what this rank has of its shard. options: digest of the
  // optimizer's. label: with the number of updates so far. DisagreeError if the owners of a shard have other values, or ranks other
  // options or numbers. Collective.
  void complete(const std::map<int, uint64_t>& values, uint64_t options, const Label& label);
  // Runs `change`, which does the same to this rank's sums and to its copies.
  void change_alike(const std::function<void()>& change);

 private:
  PendingExchange exchange(size_t bucket, const Label& label);
  bool is_current(size_t bucket) const;
  // Each digest, and minus it, for one maximum over the ranks; DisagreeError if those differ.
  void require_alike(const std::vector<double>& most) const;

  const Reducer& reducer_;
  Group group_;
  std::vector<int> owners_;                // by rank, of what it owns: second_owners()
  std::vector<std::vector<Copy>> copies_;  // by bucket
  std::vector<uint32_t> sent_;             // by bucket: version of this rank's sum that its holder has
};

}  // namespace shoal
