#pragma once
// Reduction of gradients, bucket by bucket: what a strategy gives the Reducer.

#include <memory>

#include "engine/reducer/reduction_plan.h"

namespace shoal {

class GradientReduction {
 public:
  explicit GradientReduction(ReductionPlan plan, std::shared_ptr<CommunicationHook> hook = nullptr)
      : plan_(std::move(plan)), hook_(std::move(hook)) {}
  virtual ~GradientReduction() = default;
  GradientReduction(const GradientReduction&) = delete;
  GradientReduction& operator=(const GradientReduction&) = delete;

  const ReductionPlan& plan() const { return plan_; }
  // The hook that makes the sums, if any.
  CommunicationHook* hook() const { return hook_.get(); }
  // Adds a full bucket up over the ranks, in place. What is further is about Bucket::kept only.
  virtual PendingExchange reduce(Bucket& bucket, const Label& label) const = 0;

 private:
  ReductionPlan plan_;
  std::shared_ptr<CommunicationHook> hook_;
};

// Every rank gets everything: DDP.
class AllReduce : public GradientReduction {
 public:
  AllReduce(const Group& group, BucketCaps caps, bool used_up = false);
  PendingExchange reduce(Bucket& bucket, const Label& label) const override;

 private:
  Group group_;
};

// Every gradient has an owner, which alone gets the sum: ZeRO-2. A bucket has one owner.
class ReduceToOwner : public GradientReduction {
 public:
  // owners: rank of the group, by number of the gradient. follow: whether buckets are rebuilt in the order of arrival.
  ReduceToOwner(const Group& group, BucketCaps caps, std::vector<int> owners, bool follow = true);
  PendingExchange reduce(Bucket& bucket, const Label& label) const override;

 protected:
  ReduceToOwner(const Group& group, ReductionPlan plan) : GradientReduction(std::move(plan)), group_(group) {}

 private:
  Group group_;
};

// Every rank gets an equal range of each bucket, whatever gradients it cuts: Megatron, FSDP. Buckets hold the gradients
// in the order of registration, last first, whatever order they arrive in, since parameters are laid out like them.
class ReduceScatter : public GradientReduction {
 public:
  ReduceScatter(const Group& group, BucketCaps caps);
  PendingExchange reduce(Bucket& bucket, const Label& label) const override;

 protected:
  ReduceScatter(const Group& group, ReductionPlan plan) : GradientReduction(std::move(plan)), group_(group) {}

 private:
  Group group_;
};

}  // namespace shoal
