#pragma once
// What a strategy decides about gradients: which travel together, where their sum goes, and what a rank keeps of it.

#include "engine/reducer/bucket.h"
#include "shoal/hooks.h"

namespace shoal {

struct BucketCaps {
  int64_t first_bytes = 1 << 20;
  int64_t bytes = 25 << 20;
  std::optional<int64_t> most_numel{};  // elements that no bucket exceeds, unless a single gradient does
};

// The sum that a communication hook takes over.
struct HookPoint {
  Group group;
  SumFor sum_for = SumFor::everybody;
  bool of_kept = false;  // of what a sum in a smaller group has left in Bucket::kept, not of the bucket
};

class Exchange {
 public:
  virtual ~Exchange() = default;
  // Buckets of gradients, given the order in which they are expected. Equal on all ranks.
  virtual std::vector<std::vector<size_t>> plan(const std::vector<Gradient>& gradients,
                                                std::span<const size_t> order) const = 0;
  // Whether the plan depends on the order.
  virtual bool follows_order() const { return true; }
  // Where the gradients of a bucket lie in its memory.
  virtual FlatLayout layout(std::span<const int64_t> numels, size_t element_bytes) const {
    return {numels, element_bytes};
  }
  // Adds a full bucket up over the ranks, in place. What is further is about Bucket::kept only.
  virtual PendingExchange reduce(Bucket& bucket, const Label& label) const = 0;
  // Whether it adds up within smaller groups first, and what is further adds these sums up, each by its element.
  virtual bool two_stages() const { return false; }
  virtual HookPoint hook_point() const = 0;
  // The hook that takes its place, if any.
  virtual CommunicationHook* hook() const { return nullptr; }
  // Whether every rank gets every sum whole.
  virtual bool everywhere() const = 0;
  // Whether what ranks must know of each other (bucket.h: Facts) rides in the buckets; otherwise it takes a small
  // collective of its own at the end of a step.
  virtual bool carries_facts() const { return everywhere(); }
  // A step was abandoned, on all ranks.
  virtual void step_abandoned() const {}
  // The place of a rank among those that keep a sum together: all, or those of a smaller group.
  virtual int place(int rank) const { return rank; }
  // Elements of the bucket's payload that hold the sum, at a place, afterwards; the others are void there.
  virtual Range kept(const Bucket& bucket, int place) const = 0;
  // Whether a place keeps all of a bucket's sum; also for a sparse gradient's bucket, which has no elements.
  virtual bool keeps_whole(const Bucket&, int /*place*/) const { return everywhere(); }
  // Whether the sum goes to memory of its own (Bucket::kept), so that the bucket's is needed only until then.
  virtual bool apart() const { return false; }
  // Whether sums are used up within the step, so that buckets have memory only meanwhile.
  virtual bool used_up() const { return false; }
};

// Every rank gets everything: DDP.
class AllReduce : public Exchange {
 public:
  AllReduce(Group group, BucketCaps caps, bool used_up = false)
      : group_(std::move(group)), caps_(caps), used_up_(used_up) {}
  std::vector<std::vector<size_t>> plan(const std::vector<Gradient>& gradients,
                                        std::span<const size_t> order) const override;
  PendingExchange reduce(Bucket& bucket, const Label& label) const override;
  HookPoint hook_point() const override { return {group_, SumFor::everybody}; }
  bool everywhere() const override { return true; }
  Range kept(const Bucket& bucket, int) const override { return {0, bucket.payload_numel()}; }
  bool used_up() const override { return used_up_; }

 private:
  Group group_;
  BucketCaps caps_;
  bool used_up_;
};

// Every gradient has an owner, which alone gets the sum: ZeRO-2. A bucket has one owner.
class ReduceToOwner : public Exchange {
 public:
  // owners: rank of the group, by number of the gradient. follow: whether buckets are rebuilt in the order of arrival.
  ReduceToOwner(Group group, BucketCaps caps, std::vector<int> owners, bool follow = true)
      : group_(std::move(group)), caps_(caps), owners_(std::move(owners)), follow_(follow) {}
  std::vector<std::vector<size_t>> plan(const std::vector<Gradient>& gradients,
                                        std::span<const size_t> order) const override;
  bool follows_order() const override { return follow_; }
  PendingExchange reduce(Bucket& bucket, const Label& label) const override;
  HookPoint hook_point() const override { return {group_, SumFor::owner}; }
  bool everywhere() const override { return false; }
  Range kept(const Bucket& bucket, int rank) const override;
  bool keeps_whole(const Bucket& bucket, int rank) const override { return owner(bucket) == rank; }

 private:
  int owner(const Bucket& bucket) const { return owners_[bucket.members().front()]; }

  Group group_;
  BucketCaps caps_;
  std::vector<int> owners_;
  bool follow_;
};

// Whether what ranks must know of each other takes a collective of its own: where buckets do not carry it, and where
// all gradients have 16 bits, which cannot carry a weight exactly.
bool facts_apart(const std::vector<Gradient>& gradients, bool carried);

// Memory that splits into equal ranges for the ranks, which begin at the same elements in every dtype from 16 to 64
// bits.
FlatLayout scatter_layout(std::span<const int64_t> numels, size_t element_bytes, int ranks);

// Every rank gets an equal range of each bucket, whatever gradients it cuts: Megatron, FSDP. Buckets hold the gradients
// in the order of registration, last first, whatever order they arrive in, since parameters are laid out like them.
class ReduceScatter : public Exchange {
 public:
  ReduceScatter(Group group, BucketCaps caps) : group_(std::move(group)), caps_(caps) {}
  std::vector<std::vector<size_t>> plan(const std::vector<Gradient>& gradients,
                                        std::span<const size_t> order) const override;
  bool follows_order() const override { return false; }
  FlatLayout layout(std::span<const int64_t> numels, size_t element_bytes) const override;
  PendingExchange reduce(Bucket& bucket, const Label& label) const override;
  HookPoint hook_point() const override { return {group_, SumFor::parts}; }
  bool everywhere() const override { return false; }
  Range kept(const Bucket& bucket, int rank) const override { return bucket.layout().part(rank); }

 private:
  Group group_;
  BucketCaps caps_;
};

}  // namespace shoal
