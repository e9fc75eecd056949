#include "elastic/elastic_parts.h"

#include <c10/util/Type.h>
#include <fmt/format.h>
#include <torch/optim/lbfgs.h>

#include <algorithm>
#include <typeinfo>
#include <utility>

#include "comm/group/hosts.h"
#include "comm/membership/first_generation.h"
#include "elastic/access.h"
#include "elastic/wrapped_parts.h"
#include "engine/sharded/second_owners.h"
#include "engine/sharded/sharded_state.h"
#include "optim/state.h"
#include "shoal/error.h"
#include "shoal/fsdp.h"
#include "shoal/shard_gossip.h"

namespace shoal {
namespace {

void require_group_of(const World& world, const Group& group) {
  if (group.name() == world.group().name()) return;
  throw UsageError("Elastic: the optimizer's group is not the world's: give it world.group()");
}

class WithFSDP : public Wrapped {
 public:
  WithFSDP(const World& world, FullyShardedCore& parallel, FullyShardedOptimizerCore& optimizer)
      : Wrapped(parallel, optimizer, &optimizer),
        parallel_(parallel),
        optimizer_(optimizer),
        averages_(dynamic_cast<ShardGossipOptimizerCore*>(&optimizer) != nullptr) {
    // First, since a second Elastic meets hosts that may have become unequal, where ranks would refuse it for different
    // reasons.
    if (averages_) fresh_cell(world);
    ElasticAccess::require_regroupable(parallel);
    ElasticAccess::require_regroupable(optimizer, parallel, world.group());
  }
  std::vector<at::Tensor> frozen_copies() const override { return ElasticAccess::frozen_copies(parallel_); }
  bool takes_shares() const override { return !averages_; }
  void meet_behind_share() override { ElasticAccess::meet_behind_share(parallel_); }
  std::string in_place_of_lost() const override {
    return averages_ ? "other ranks of its host, if any are left, update its share of the host's own parameters"
                     : Wrapped::in_place_of_lost();
  }
  std::string lost_shards() const override {
    return averages_ ? "each host that is left has all shards of its own parameters, and those of lost hosts are lost"
                     : Wrapped::lost_shards();
  }
  bool shards_over_sockets() const override { return !averages_; }
  bool gives_shards(const Group& group) const override {
    return !averages_ &&
           (ElasticAccess::has_second_owners(optimizer_) || ElasticAccess::needs_second_owners(parallel_, group));
  }
  void come_without_shards() override { ElasticAccess::come_without_shards(optimizer_); }
  bool can_spare(const std::vector<int>& ranks) const override { return owners_are_left(optimizer_, ranks); }
  std::string why_closed() const override {
    return averages_ ? "its hosts have parameters of their own, which only ranks of the same host could give" : "";
  }
  bool stands_for_gradient(const at::Tensor& parameter) const override {
    return ElasticAccess::has_buffered_gradient(optimizer_, parameter);
  }
  void compute_shares(bool now) override {
    ElasticAccess::compute_shares(parallel_, now);
    Wrapped::compute_shares(now);
  }
  void regroup(const Group& group, int64_t step) override {
    ElasticAccess::regroup(optimizer_, parallel_, group, step);
  }

 private:
  FullyShardedCore& parallel_;
  FullyShardedOptimizerCore& optimizer_;
  bool averages_;  // hosts, each of which has parameters of its own
};

class Megatron : public ElasticParts {
 public:
  explicit Megatron(DistributedOptimizerCore& optimizer) : ElasticParts(&optimizer), optimizer_(optimizer) {
    ElasticAccess::require_regroupable(optimizer);
  }
  torch::nn::Module& module() const override { return *optimizer_.modules().front(); }
  int64_t step() const override { return ElasticAccess::reducer(optimizer_).step(); }
  void before_backward(std::function<void()> listener) override {
    ElasticAccess::before_backward(optimizer_, std::move(listener));
  }
  NoSync no_sync(bool accumulate) override { return optimizer_.no_sync(accumulate); }
  torch::optim::Optimizer& optimizer() const override { return optimizer_; }
  Reducer* reducer() const override { return &ElasticAccess::reducer(optimizer_); }
  ModuleTensors tensors() const override { return ElasticAccess::tensors(optimizer_); }
  void set_share(std::optional<double> share) override { ElasticAccess::set_share(optimizer_, share); }
  LoggingData logging_data() const override { return optimizer_.logging_data(); }
  bool stands_for_gradient(const at::Tensor& parameter) const override {
    return ElasticAccess::has_buffered_gradient(optimizer_, parameter);
  }
  bool shards_over_sockets() const override { return ElasticAccess::shards_across_hosts(optimizer_); }
  bool gives_shards(const Group& group) const override {
    return ElasticAccess::has_second_owners(optimizer_) || ElasticAccess::needs_second_owners(optimizer_, group);
  }
  void come_without_shards() override { ElasticAccess::come_without_shards(optimizer_); }
  bool can_spare(const std::vector<int>& ranks) const override { return owners_are_left(optimizer_, ranks); }
  void regroup(const Group& group, int64_t step) override { ElasticAccess::regroup(optimizer_, group, step); }

 private:
  DistributedOptimizerCore& optimizer_;
};

[[noreturn]] void refuse_pair(const DataParallelCore& parallel, const torch::optim::Optimizer& optimizer) {
  throw UsageError(
      fmt::format("Elastic: {} with {} is not supported: use DistributedDataParallel with OSS or an optimizer that is "
                  "whole on each rank, ShardedDataParallel with OSS, FullyShardedDataParallel with "
                  "FullyShardedOptimizer or ShardGossipOptimizer, or DistributedOptimizer without a wrapper",
                  parallel.logging_data().strategy, c10::demangle(typeid(optimizer).name())));
}

std::unique_ptr<ElasticParts> parts_of(const World& world, DataParallelCore& parallel,
                                       torch::optim::Optimizer& optimizer) {
  auto* sharded = dynamic_cast<ShardedOptimizerBase*>(&optimizer);
  auto* oss = dynamic_cast<OSSCore*>(&optimizer);
  if (dynamic_cast<const torch::optim::LBFGS*>(&optimizer) != nullptr) {
    throw UsageError("Elastic: L-BFGS communicates in its step, by its closure, and cannot be finished after a death");
  }
  if (auto* ddp = dynamic_cast<DistributedDataParallelCore*>(&parallel)) {
    if (sharded == oss) return parts_of_ddp(world, *ddp, optimizer, oss);
  } else if (auto* sharded_ddp = dynamic_cast<ShardedDataParallelCore*>(&parallel)) {
    ElasticAccess::require_regroupable(*sharded_ddp, optimizer);
    return parts_of_sharded_ddp(world, *sharded_ddp, *oss);
  } else if (auto* fsdp = dynamic_cast<FullyShardedCore*>(&parallel)) {
    if (auto* fully_sharded = dynamic_cast<FullyShardedOptimizerCore*>(&optimizer)) {
      return std::make_unique<WithFSDP>(world, *fsdp, *fully_sharded);
    }
  }
  refuse_pair(parallel, optimizer);
}

}  // namespace

bool owners_are_left(const ShardedOptimizerBase& optimizer, const std::vector<int>& ranks) {
  if (!ElasticAccess::has_second_owners(optimizer)) return true;
  const auto owners = choose_second_owners(hosts_of(ElasticAccess::job(optimizer)));
  const auto leaves = [&](int rank) { return std::find(ranks.begin(), ranks.end(), rank) != ranks.end(); };
  return std::none_of(ranks.begin(), ranks.end(), [&](int rank) { return leaves(owners[static_cast<size_t>(rank)]); });
}

ElasticParts::~ElasticParts() {
  if (sharded_ != nullptr) ElasticAccess::unguard(*sharded_);
}

std::vector<at::Tensor> ElasticParts::divided() const {
  std::vector<at::Tensor> list;
  for (const auto& gradient : reducer()->gradients()) list.push_back(gradient.parameter);
  return list;
}

bool ElasticParts::finishes_alone() const {
  return sharded_ == nullptr || ElasticAccess::has_second_owners(*sharded_);
}

std::string ElasticParts::why_one_host() const {
  if (sharded_ == nullptr || reducer()->reduction().hook() == nullptr) return "";
  return "a communication_hook or reduce_fp16 is not supported where shards are on several hosts, or ranks talk over "
         "sockets: leave it out";
}

void ElasticParts::guard() {
  if (sharded_ != nullptr) ElasticAccess::guard(*sharded_);
}

void ElasticParts::compute_shares(bool now) {
  if (sharded_ != nullptr) ElasticAccess::compute_shares(*sharded_, now);
}

bool ElasticParts::prepare_commit() {
  return sharded_ != nullptr && ElasticAccess::prepare_commit(*sharded_);
}

void ElasticParts::commit(bool map) {
  if (sharded_ != nullptr) ElasticAccess::commit(*sharded_, map);
}

void ElasticParts::publish_update() {
  if (sharded_ != nullptr) ElasticAccess::publish_update(*sharded_);
}

std::shared_ptr<void> ElasticParts::begin_update() {
  if (sharded_ != nullptr && ElasticAccess::has_second_owners(*sharded_)) ElasticAccess::allow_update(*sharded_);
  return nullptr;
}

bool ElasticParts::update_was_refused() const {
  return sharded_ != nullptr && ElasticAccess::update_was_refused(*sharded_);
}

bool ElasticParts::misses_update() const {
  return sharded_ != nullptr && ElasticAccess::misses_update(*sharded_);
}

std::optional<int64_t> ElasticParts::updates_to_compare() const {
  return sharded_ != nullptr ? ElasticAccess::updates_to_compare(*sharded_) : std::nullopt;
}

bool ElasticParts::has_replicas() const {
  return sharded_ != nullptr && ElasticAccess::has_replicas(*sharded_);
}

void ElasticParts::map_on_host(bool map) {
  ElasticAccess::map_on_host(*sharded_, map);
}

bool ElasticParts::commit_over_hosts(bool came, const std::function<bool(bool passes)>& decide) {
  return ElasticAccess::commit_over_hosts(*sharded_, came, decide);
}

void ElasticParts::visit_state(
    const std::function<void(const std::string& name, const NamedState& state)>& visit) const {
  if (sharded_ != nullptr) return ElasticAccess::visit_state(*sharded_, module(), visit);
  const auto& states = optimizer().state();
  for (const auto& piece : pieces_of(optimizer(), module())) {
    const auto found = states.find(piece.updated.unsafeGetTensorImpl());
    visit(piece.name, found != states.end() ? named_state(*found->second) : NamedState());
  }
}

void ElasticParts::take_state(const OptimizerState& whole) const {
  sharded_ != nullptr ? ElasticAccess::take_state(*sharded_, module(), whole)
                      : load_optimizer_state(optimizer(), module(), whole, StateDtypes::kept);
}

int64_t ElasticParts::updated_elements() const {
  const auto& updating = sharded_ != nullptr ? sharded_->local_optimizer() : optimizer();
  int64_t elements = 0;
  for (const auto& group : updating.param_groups()) {
    for (const auto& values : group.params()) elements += values.numel();
  }
  return elements;
}

std::string ElasticParts::in_place_of_lost() const {
  if (sharded_ == nullptr) return "every rank has all parameters and their state";
  if (ElasticAccess::has_second_owners(*sharded_))
    return "its shards were on other ranks, too, and are divided among all that are left";
  return has_replicas() ? "other ranks of its host, if any are left, update its share of the parameters, which other "
                          "hosts have, too"
                        : "the others update its share of the parameters";
}

std::string ElasticParts::lost_shards() const {
  if (sharded_ == nullptr) return "no shard is lost: each rank that is left has all parameters and their state";
  if (ElasticAccess::has_second_owners(*sharded_))
    return "each shard was on two ranks, and is lost where both have ended";
  return has_replicas() ? "no shard is lost: each host that is left has all parameters and their state"
                        : "no shard is lost: the ranks that are left have all parameters and their state";
}

std::vector<std::string> ElasticParts::description() const {
  return sharded_ != nullptr ? ElasticAccess::description(*sharded_) : std::vector<std::string>();
}

GradScaler* ElasticParts::own_scaler() const {
  return sharded_ != nullptr ? ElasticAccess::own_scaler(*sharded_) : nullptr;
}

std::unique_ptr<ElasticParts> elastic_parts(const World& world, DataParallelCore& parallel,
                                            torch::optim::Optimizer& optimizer) {
  const bool of_hosts = dynamic_cast<ShardGossipOptimizerCore*>(&optimizer) != nullptr;
  if (!of_hosts && parallel.group().name() != world.group().name()) {
    throw UsageError("Elastic: the wrapper's group is not the world's: give it world.group()");
  }
  auto parts = parts_of(world, parallel, optimizer);
  if (const auto* sharded = dynamic_cast<const ShardedOptimizerBase*>(&optimizer)) {
    require_group_of(world, ElasticAccess::job(*sharded));
  }
  return parts;
}

std::unique_ptr<ElasticParts> elastic_parts(const World& world, DistributedOptimizerCore& optimizer) {
  auto parts = std::make_unique<Megatron>(optimizer);
  require_group_of(world, optimizer.group());
  return parts;
}

std::unique_ptr<ElasticParts> elastic_parts(const World& world, ElasticTraining& training) {
  ElasticAccess::require_elastic(training);
  if (auto* updates = ElasticAccess::local_updates(training)) return elastic_parts(world, *updates);
  if (auto* optimizer = dynamic_cast<DistributedOptimizerCore*>(&training.optimizer())) {
    return elastic_parts(world, *optimizer);
  }
  return elastic_parts(world, *ElasticAccess::data_parallel(training), training.optimizer());
}

}  // namespace shoal
