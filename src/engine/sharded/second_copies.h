#pragma once
// Second owners of shards, for elastic jobs whose ranks share no memory, and what they get of gradients.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "engine/reducer/reducer.h"
#include "optim/state.h"
#include "shoal/group.h"

namespace shoal {

// By rank, the rank that owns the same a second time: the one at its place on the next host, counted round where that
// has fewer ranks; with one host, the next rank. hosts: by rank, as returned by hosts_of(). Several ranks at least.
std::vector<int> second_owners(const std::vector<int>& hosts);

// DisagreeError: some ranks have not updated in a step in which others have.
[[noreturn]] void refuse_unequal_updates();

// What this rank says before an update, to be compared with what others say. Numbers are of 64 bits, of which the upper
// 53 are compared.
struct SecondQuestion {
  std::map<int, uint64_t> shards{};  // by first owner, digest of what this rank has of a shard that it owns
  // The same of its gradient, where they are compared.
  std::optional<std::map<int, uint64_t>> gradients{};
  uint64_t options = 0;   // digest of the optimizer's
  int64_t updates = 0;    // that it has made
  bool asks = false;      // for what the caller knows
  bool replaced = false;  // the optimizer's state, here and past the job's updates

  // Adds the bits of an element to the digest of an owner's shard, of another one in each step.
  void add_element(int owner, const at::Tensor& values);
  // The same of each tensor of the state, and its numbers.
  void add_state(int owner, const NamedState& state);
  // Adds all elements; undefined: there is none.
  void add_gradient(int owner, const at::Tensor& gradient);
  struct Answer {
    bool asked = false;            // by some rank
    std::optional<int> differs{};  // the first owner whose second one has another gradient
  };
  // owners: second_owners(). On all ranks: UsageError if one's state was replaced; DisagreeError if the two owners of a
  // shard have other digests, or ranks other options or numbers of updates. Collective.
  Answer ask(const Group& group, const std::vector<int>& owners, const Label& label) const;
};

// Sums of gradients that this rank holds a second time. An owner sends its sum of a bucket once the bucket is reduced,
// while backward computes the next ones. What changes a sum later is noticed by its tensor's version; then complete()
// sends all sums again.
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
  // All copies are as the sums are at present, and all ranks have answered the question. Collective.
  void complete(SecondQuestion question);
  // Runs `change`, which does the same to this rank's sums and to its copies.
  void change_alike(const std::function<void()>& change);

 private:
  PendingExchange exchange(size_t bucket, const Label& label);
  bool is_current(size_t bucket) const;
  void make();

  const Reducer& reducer_;
  Group group_;
  std::vector<int> owners_;                // by rank, of what it owns: second_owners()
  std::vector<std::vector<Copy>> copies_;  // by bucket
  std::vector<uint32_t> sent_;             // by bucket: version of this rank's sum that its holder has
  int64_t built_ = 0;                      // builds of the reducer's buckets then
};

}  // namespace shoal
