// DistributedDataParallel, ZeRO-1 and ZeRO-2 as elastic trainings.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <set>

#include "elastic/access.h"
#include "elastic/wrapped_parts.h"
#include "shoal/error.h"

namespace shoal {
namespace {

// OSS, or an optimizer that is whole on each rank (nullptr).
class WithOSS : public Wrapped {
 public:
  WithOSS(DataParallelCore& parallel, torch::optim::Optimizer& optimizer, OSSCore* oss)
      : Wrapped(parallel, optimizer, oss), oss_(oss) {}
  bool shards_over_sockets() const override { return oss_ != nullptr && ElasticAccess::shards_across_hosts(*oss_); }
  bool gives_shards(const Group& group) const override {
    return oss_ != nullptr &&
           (ElasticAccess::has_second_owners(*oss_) || ElasticAccess::needs_second_owners(*oss_, group));
  }
  void come_without_shards() override { ElasticAccess::come_without_shards(*oss_); }
  std::vector<at::Tensor> divided() const override {
    std::vector<at::Tensor> list;
    for (const auto& group : optimizer().param_groups()) {
      std::copy_if(group.params().begin(), group.params().end(), std::back_inserter(list),
                   [this](const at::Tensor& parameter) { return ElasticAccess::has_owner(*oss_, parameter); });
    }
    return list;
  }
  std::string why_closed() const override {
    if (oss_ == nullptr) return "";
    std::set<const c10::TensorImpl*> known;
    for (const auto& entry : tensors().parameters) known.insert(entry.tensor.unsafeGetTensorImpl());
    for (const auto& parameter : divided()) {
      if (known.contains(parameter.unsafeGetTensorImpl())) continue;
      return fmt::format(
          "its optimizer has parameter {} [{}], which no wrapper trains, and which could not be given: make it a "
          "part of the module",
          oss_->param_to_index(parameter), fmt::join(parameter.sizes(), ", "));
    }
    return why_not_dense();
  }
  // Who has an owner depends on what was frozen when OSS was made, and not only on what is now.
  std::vector<std::string> description() const override {
    auto lines = Wrapped::description();
    if (oss_ == nullptr) return lines;
    std::vector<std::string> list;
    for (const auto& entry : tensors().parameters) {
      if (!ElasticAccess::has_owner(*oss_, entry.tensor)) list.push_back(entry.name);
    }
    if (list.empty()) list.emplace_back("none");
    lines.push_back(
        fmt::format("parameters that were frozen when OSS was made, and have no owner: {}", fmt::join(list, ", ")));
    return lines;
  }
  bool can_spare(const std::vector<int>& ranks) const override {
    return oss_ == nullptr || owners_are_left(*oss_, ranks);
  }

 protected:
  OSSCore* oss() const { return oss_; }
  void require_dense(const Group& group) const {
    if (group.size() == 1) return;
    if (const auto why = why_not_dense(); !why.empty()) throw UsageError("Elastic: " + why);
  }

 private:
  // A lone rank may have sparse gradients. Others could neither finish its update with them nor make it a second time.
  std::string why_not_dense() const {
    if (oss_ == nullptr || (oss_->group().size() == 1 && !ElasticAccess::shards_across_hosts(*oss_))) return "";
    for (const auto& entry : tensors().parameters) {
      if (!entry.sparse_gradient || !ElasticAccess::has_owner(*oss_, entry.tensor)) continue;
      return fmt::format(
          "sparse gradients, such as that of {}, are not supported with OSS over several ranks: make them dense",
          entry.name);
    }
    return "";
  }

  OSSCore* oss_;
};

class WithDDP : public WithOSS {
 public:
  WithDDP(const World& world, DistributedDataParallelCore& parallel, torch::optim::Optimizer& optimizer, OSSCore* oss)
      : WithOSS(parallel, optimizer, oss), parallel_(parallel) {
    ElasticAccess::require_regroupable(parallel);
    ElasticAccess::check_optimizer(parallel, optimizer);
    if (oss != nullptr) ElasticAccess::require_regroupable(*oss, world.group());
    require_dense(world.group());
  }
  std::string why_one_host() const override { return ""; }  // all ranks have all sums
  void regroup(const Group& group, int64_t step) override {
    require_dense(group);
    if (oss() != nullptr) ElasticAccess::regroup(*oss(), group, step);
    ElasticAccess::regroup(parallel_, group, step, oss() != nullptr);
  }

 private:
  DistributedDataParallelCore& parallel_;
};

class WithShardedDDP : public WithOSS {
 public:
  WithShardedDDP(const World& world, ShardedDataParallelCore& parallel, OSSCore& oss)
      : WithOSS(parallel, oss, &oss), parallel_(parallel) {
    ElasticAccess::require_regroupable(oss, world.group());
    require_second_owners(world.group());
  }
  void guard() override {
    Wrapped::guard();
    ElasticAccess::send_to_second_owners(parallel_);
  }
  void regroup(const Group& group, int64_t step) override {
    require_second_owners(group);  // which the ranks before may not have needed
    ElasticAccess::regroup(*oss(), group, step);
    ElasticAccess::regroup(parallel_, step);
  }

 private:
  void require_second_owners(const Group& group) const {
    if (ElasticAccess::needs_second_owners(*oss(), group)) ElasticAccess::require_second_owners(parallel_);
    require_dense(group);
  }

  ShardedDataParallelCore& parallel_;
};

}  // namespace

std::unique_ptr<ElasticParts> parts_of_ddp(const World& world, DistributedDataParallelCore& parallel,
                                           torch::optim::Optimizer& optimizer, OSSCore* oss) {
  return std::make_unique<WithDDP>(world, parallel, optimizer, oss);
}

std::unique_ptr<ElasticParts> parts_of_sharded_ddp(const World& world, ShardedDataParallelCore& parallel,
                                                   OSSCore& oss) {
  return std::make_unique<WithShardedDDP>(world, parallel, oss);
}

}  // namespace shoal
