#pragma once
// Elastic trainings with a wrapper.

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "elastic/access.h"
#include "elastic/elastic_parts.h"
#include "engine/wrapper/data_parallel_state.h"
#include "shoal/zero.h"

namespace shoal {

class Wrapped : public ElasticParts {
 public:
  Wrapped(DataParallelCore& parallel, torch::optim::Optimizer& optimizer, ShardedOptimizerBase* sharded)
      : ElasticParts(sharded), parallel_(parallel), optimizer_(optimizer) {}

  torch::nn::Module& module() const override { return *parallel_.module(); }
  int64_t step() const override { return parallel_.steps(); }
  void before_backward(std::function<void()> listener) override {
    ElasticAccess::before_backward(parallel_, std::move(listener));
  }
  NoSync no_sync(bool accumulate) override { return parallel_.no_sync(accumulate); }
  torch::optim::Optimizer& optimizer() const override { return optimizer_; }
  Reducer* reducer() const override { return &reducer_of(parallel_); }
  ModuleTensors tensors() const override { return tensors_of(parallel_); }
  void set_share(std::optional<double> share) override { shoal::set_share(parallel_, share); }
  LoggingData logging_data() const override { return parallel_.logging_data(); }

 private:
  DataParallelCore& parallel_;
  torch::optim::Optimizer& optimizer_;
};

// Whether no two owners of a shard are among these ranks.
bool owners_are_left(const ShardedOptimizerBase& optimizer, const std::vector<int>& ranks);

// oss: the optimizer, or nullptr if it is whole on each rank.
std::unique_ptr<ElasticParts> parts_of_ddp(const World& world, DistributedDataParallelCore& parallel,
                                           torch::optim::Optimizer& optimizer, OSSCore* oss);
std::unique_ptr<ElasticParts> parts_of_sharded_ddp(const World& world, ShardedDataParallelCore& parallel, OSSCore& oss);

}  // namespace shoal
