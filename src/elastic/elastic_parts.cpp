#include "elastic/elastic_parts.h"

#include <c10/util/Type.h>
#include <fmt/format.h>
#include <torch/optim/lbfgs.h>

#include <typeinfo>

#include "shoal/error.h"

namespace shoal {

ElasticParts::ElasticParts(const World& world, DataParallelCore& parallel, torch::optim::Optimizer& optimizer)
    : ddp_(dynamic_cast<DistributedDataParallelCore*>(&parallel)),
      sharded_ddp_(dynamic_cast<ShardedDataParallelCore*>(&parallel)),
      oss_(dynamic_cast<OSSCore*>(&optimizer)) {
  const auto* of = &optimizer;
  if (ddp_ == nullptr && sharded_ddp_ == nullptr) {
    throw UsageError(
        fmt::format("Elastic: {} is not supported yet, only DistributedDataParallel and ShardedDataParallel",
                    parallel.logging_data().strategy));
  }
  if (oss_ == nullptr && dynamic_cast<const ShardedOptimizerBase*>(of) != nullptr) {
    throw UsageError(
        fmt::format("Elastic: {} is sharded over ranks, which is supported of OSS only: use OSS, or an "
                    "optimizer that is whole on each rank",
                    c10::demangle(typeid(*of).name())));
  }
  if (dynamic_cast<const torch::optim::LBFGS*>(of) != nullptr) {
    throw UsageError("Elastic: L-BFGS communicates in its step, by its closure, and cannot be finished after a death");
  }
  if (ddp_ != nullptr) {
    ddp_->require_regroupable();
    ddp_->check_optimizer(optimizer);
  } else {
    sharded_ddp_->require_regroupable(optimizer);
  }
  if (oss_ == nullptr) return;
  oss_->require_regroupable();
  if (oss_->group().name() == world.group().name()) return;
  throw UsageError("Elastic: the optimizer's group is not the world's: give it world.group()");
}

ElasticParts::~ElasticParts() {
  if (oss_ != nullptr) oss_->unguard();
}

void ElasticParts::guard() {
  if (oss_ != nullptr) oss_->guard();
}

bool ElasticParts::prepare_commit() {
  return oss_ != nullptr && oss_->prepare_commit();
}

void ElasticParts::commit(bool map) {
  if (oss_ != nullptr) oss_->commit(map);
}

void ElasticParts::regroup(const Group& group, int64_t step) {
  if (oss_ != nullptr) oss_->regroup(group);
  if (ddp_ != nullptr) {
    ddp_->regroup(group, step);
  } else {
    sharded_ddp_->regroup(step);
  }
}

}  // namespace shoal
