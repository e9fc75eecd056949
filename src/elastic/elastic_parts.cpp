#include "elastic/elastic_parts.h"

#include <c10/util/Type.h>
#include <fmt/format.h>
#include <torch/optim/lbfgs.h>

#include <typeinfo>
#include <utility>

#include "shoal/error.h"
#include "shoal/zero.h"

namespace shoal {
namespace {

void require_group_of(const World& world, const Group& group) {
  if (group.name() == world.group().name()) return;
  throw UsageError("Elastic: the optimizer's group is not the world's: give it world.group()");
}

class Wrapped : public ElasticParts {
 public:
  Wrapped(DataParallelCore& parallel, ShardedOptimizerBase* sharded) : ElasticParts(sharded), parallel_(parallel) {}

  torch::nn::Module& module() const override { return *parallel_.module(); }
  int64_t step() const override { return parallel_.step(); }
  void before_backward(std::function<void()> listener) override { parallel_.before_backward(std::move(listener)); }
  NoSync no_sync(bool accumulate) override { return parallel_.no_sync(accumulate); }

 private:
  DataParallelCore& parallel_;
};

// An optimizer that is whole on each rank, or OSS.
class WithDDP : public Wrapped {
 public:
  WithDDP(DistributedDataParallelCore& parallel, torch::optim::Optimizer& optimizer, OSSCore* oss)
      : Wrapped(parallel, oss), parallel_(parallel), oss_(oss) {
    parallel.require_regroupable();
    parallel.check_optimizer(optimizer);
    if (oss_ != nullptr) oss_->require_regroupable();
  }
  DistributedDataParallelCore* replicated() const override { return oss_ != nullptr ? nullptr : &parallel_; }
  void regroup(const Group& group, int64_t step) override {
    if (oss_ != nullptr) oss_->regroup(group);
    parallel_.regroup(group, step);
  }

 private:
  DistributedDataParallelCore& parallel_;
  OSSCore* oss_;
};

class WithShardedDDP : public Wrapped {
 public:
  WithShardedDDP(ShardedDataParallelCore& parallel, OSSCore& oss)
      : Wrapped(parallel, &oss), parallel_(parallel), oss_(oss) {
    oss.require_regroupable();
  }
  void regroup(const Group& group, int64_t step) override {
    oss_.regroup(group);
    parallel_.regroup(step);
  }

 private:
  ShardedDataParallelCore& parallel_;
  OSSCore& oss_;
};

class Megatron : public ElasticParts {
 public:
  explicit Megatron(DistributedOptimizerCore& optimizer) : ElasticParts(&optimizer), optimizer_(optimizer) {
    optimizer.require_regroupable();
  }
  torch::nn::Module& module() const override { return *optimizer_.modules().front(); }
  int64_t step() const override { return optimizer_.synchronising_steps(); }
  void before_backward(std::function<void()> listener) override { optimizer_.before_backward(std::move(listener)); }
  NoSync no_sync(bool accumulate) override { return optimizer_.no_sync(accumulate); }
  bool stands_for_gradient(const at::Tensor& parameter) const override {
    return optimizer_.has_buffered_gradient(parameter);
  }
  void regroup(const Group& group, int64_t step) override { optimizer_.regroup(group, step); }

 private:
  DistributedOptimizerCore& optimizer_;
};

// Those that no wrapper has.
void require_supported(const torch::optim::Optimizer& optimizer, bool oss) {
  if (dynamic_cast<const DistributedOptimizerCore*>(&optimizer) != nullptr) {
    throw UsageError("Elastic: DistributedOptimizer reduces gradients itself: pass it without a wrapper");
  }
  if (!oss && dynamic_cast<const ShardedOptimizerBase*>(&optimizer) != nullptr) {
    throw UsageError(fmt::format(
        "Elastic: {} is sharded over ranks, which is supported of OSS and DistributedOptimizer only: use one "
        "of them, or an optimizer that is whole on each rank",
        c10::demangle(typeid(optimizer).name())));
  }
  if (dynamic_cast<const torch::optim::LBFGS*>(&optimizer) != nullptr) {
    throw UsageError("Elastic: L-BFGS communicates in its step, by its closure, and cannot be finished after a death");
  }
}

}  // namespace

ElasticParts::~ElasticParts() {
  if (sharded_ != nullptr) sharded_->unguard();
}

void ElasticParts::guard() {
  if (sharded_ != nullptr) sharded_->guard();
}

bool ElasticParts::prepare_commit() {
  return sharded_ != nullptr && sharded_->prepare_commit();
}

void ElasticParts::commit(bool map) {
  if (sharded_ != nullptr) sharded_->commit(map);
}

std::unique_ptr<ElasticParts> elastic_parts(const World& world, DataParallelCore& parallel,
                                            torch::optim::Optimizer& optimizer) {
  auto* ddp = dynamic_cast<DistributedDataParallelCore*>(&parallel);
  auto* sharded_ddp = dynamic_cast<ShardedDataParallelCore*>(&parallel);
  auto* oss = dynamic_cast<OSSCore*>(&optimizer);
  if (ddp == nullptr && sharded_ddp == nullptr) {
    throw UsageError(
        fmt::format("Elastic: {} is not supported yet, only DistributedDataParallel and ShardedDataParallel",
                    parallel.logging_data().strategy));
  }
  require_supported(optimizer, oss != nullptr);
  std::unique_ptr<ElasticParts> parts;
  if (ddp != nullptr) {
    parts = std::make_unique<WithDDP>(*ddp, optimizer, oss);
  } else {
    sharded_ddp->require_regroupable(optimizer);
    parts = std::make_unique<WithShardedDDP>(*sharded_ddp, *oss);
  }
  if (oss != nullptr) require_group_of(world, oss->group());
  return parts;
}

std::unique_ptr<ElasticParts> elastic_parts(const World& world, DistributedOptimizerCore& optimizer) {
  auto parts = std::make_unique<Megatron>(optimizer);
  require_group_of(world, optimizer.group());
  return parts;
}

}  // namespace shoal
