#pragma once
// Reduction of gradients, bucket by bucket, as a strategy defines it for the Reducer.

#include <memory>

#include "engine/buckets/reduction_plan.h"

namespace shoal {

class GradientReduction {
 public:
  explicit GradientReduction(ReductionPlan plan, std::shared_ptr<CommunicationHook> hook = nullptr)
      : plan_(std::move(plan)), hook_(std::move(hook)) {}
  virtual ~GradientReduction() = default;
  GradientReduction(const GradientReduction&) = delete;
  GradientReduction& operator=(const GradientReduction&) = delete;

  const ReductionPlan& plan() const { return plan_; }
  // The communication hook that makes the sums, if any.
  CommunicationHook* hook() const { return hook_.get(); }
  // Sums a full bucket over the ranks, in place. PendingExchange::next_stage works on Bucket::kept only.
  virtual PendingExchange reduce(Bucket& bucket, const Label& label) const = 0;

 private:
  ReductionPlan plan_;
  std::shared_ptr<CommunicationHook> hook_;
};

// All-reduce, for DDP: every rank gets every sum.
class AllReduce : public GradientReduction {
 public:
  AllReduce(const Group& group, BucketCaps caps, bool consumed = false);
  PendingExchange reduce(Bucket& bucket, const Label& label) const override;

 private:
  Group group_;
};

// Reduce to an owner, for ZeRO-2: all gradients of a bucket have the same owner, which alone gets the sum.
class ReduceToOwner : public GradientReduction {
 public:
  // owners: rank in the group, by gradient. follow: whether buckets follow the order of arrival.
  ReduceToOwner(const Group& group, BucketCaps caps, std::vector<int> owners, bool follow = true);
  PendingExchange reduce(Bucket& bucket, const Label& label) const override;

 protected:
  ReduceToOwner(const Group& group, ReductionPlan plan) : GradientReduction(std::move(plan)), group_(group) {}

 private:
  Group group_;
};

// Reduce-scatter, for Megatron and FSDP: every rank gets an equal range of each bucket, regardless of where gradients
// begin. Buckets hold gradients in reverse order of registration, because the parameters' flat buffer has the same
// layout.
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
