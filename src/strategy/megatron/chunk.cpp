#include "strategy/megatron/chunk.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "comm/group/hosts.h"
#include "comm/group/rank_groups.h"
#include "engine/reducer/hooked_reduction.h"
#include "engine/sharded/ownership.h"
#include "engine/wrapper/data_parallel_state.h"
#include "shoal/error.h"
#include "strategy/megatron/bucket_caps.h"

namespace shoal {
namespace {

const char* about_sums(const DistributedOptimizerOptions& options) {
  if (options.overlap_grad_reduce) {
    return "which DistributedOptimizer has reduced to shards on the ranks: clip with its option clip_grad, scale "
           "losses by its option scaler, read main_grad(), drop it with zero_grad(), update with its step(), and put "
           "no DistributedDataParallel around the module";
  }
  return "which DistributedOptimizer reduces to shards in step() or reduce_model_grads(): clip with its option "
         "clip_grad, read this rank's own before that in main_grad(), drop it with zero_grad(), update with its "
         "step(), and put no DistributedDataParallel around the module";
}

// Equal ranges of buffers need equally many ranks on each host.
std::unique_ptr<GradientReduction> make_reduction(const std::vector<Gradient>& gradients, const ShardGroups& groups,
                                                  const DistributedOptimizerOptions& options, bool element_wise) {
  const auto caps = buffer_caps(gradients, options);
  const bool ranges = element_wise && groups.equal;
  std::vector<int> owners;
  if (!ranges) {
    std::vector<at::Tensor> parameters;
    for (const auto& gradient : gradients) parameters.push_back(gradient.parameter);
    owners.assign(parameters.size(), -1);
    assign_owners(parameters, groups.owners, owners);
  }
  if (!groups.replicated()) {
    if (ranges) return std::make_unique<ReduceScatter>(groups.all, caps);
    return std::make_unique<ReduceToOwner>(groups.all, caps, std::move(owners), /*follow=*/false);
  }
  auto plan = plan_in_groups(groups, ranges ? SumResult::ranges : SumResult::owner, caps);
  plan.follows_order = false;
  if (ranges) return std::make_unique<ScatterInGroups>(groups, std::move(plan));
  plan.divided = owners;
  plan.owners = std::move(owners);
  return std::make_unique<ReduceInGroups>(groups, std::move(plan));
}

}  // namespace

ShardGroups groups_of(const Group& group, const DistributedOptimizerOptions& options) {
  auto ranks = ranks_by_host(hosts_of(group));
  if (!options.shard_within_host) {
    ranks.assign(1, std::vector<int>(static_cast<size_t>(group.size())));
    std::iota(ranks.front().begin(), ranks.front().end(), 0);
  }
  auto groups = make_shard_groups(group, ranks);
  if (groups.equal) return groups;
  const auto refuse = [](const char* what) {
    throw UsageError(fmt::format(
        "DistributedOptimizer: {} with shard_within_host needs equally many ranks on each host: unset it, or "
        "start the same number on each",
        what));
  };
  if (options.reuse_grad_buf_for_param_gather) refuse("reuse_grad_buf_for_param_gather");
  if (options.communication_hook) refuse("a communication_hook");
  return groups;
}

std::shared_ptr<ShardedModule> make_chunk(const ModuleTensors& tensors, const ShardGroups& groups,
                                          const DistributedOptimizerOptions& options, bool element_wise,
                                          const std::string& prefix) {
  auto gradients = gradients_of(tensors);
  for (auto& gradient : gradients) gradient.sparse = false;  // buffers are dense
  if (options.grad_reduce_in_fp32) widen(gradients);
  auto reduction = with_hook(make_reduction(gradients, groups, options, element_wise), options.communication_hook,
                             gradients, "DistributedOptimizer", prefix);
  auto reducer =
      std::make_shared<Reducer>(std::move(gradients), groups.all,
                                ReducerOptions{.find_unused_parameters = true,
                                               .leave_grad = false,
                                               .about_sums = about_sums(options),
                                               .about_repeats = "set overlap_grad_reduce to false",
                                               .timers = options.overlap_grad_reduce ? options.timers : nullptr},
                                std::move(reduction));
  std::vector<std::unique_ptr<ParameterGather>> gathers;
  for (const auto& bucket : reducer->buckets()) {
    auto parameters = reducer->buckets().parameters_of(bucket);
    gathers.push_back(options.reuse_grad_buf_for_param_gather
                          ? gather_in_gradients(groups.shard, std::move(parameters), bucket)
                          : gather_in_parameters(groups.shard, std::move(parameters), bucket.layout(),
                                                 reducer->buckets().owners_of(bucket, groups.shard.size()),
                                                 {-1, -1, "parameters of DistributedOptimizer"}));
  }
  auto chunk = std::make_shared<ShardedModule>(groups.shard, std::move(reducer), std::move(gathers),
                                               options.overlap_param_gather ? options.timers : nullptr);
  std::vector<std::string> frozen_names;
  std::vector<at::Tensor> frozen;
  for (const auto& entry : tensors.parameters) {
    if (entry.tensor.requires_grad()) continue;
    frozen_names.push_back(prefix + entry.name);
    frozen.push_back(entry.tensor);
  }
  chunk->add_replicated(std::move(frozen_names), std::move(frozen));
  if (options.reuse_grad_buf_for_param_gather) {
    chunk->reducer().callbacks.before_writing = [raw = chunk.get()] { raw->wait_all(); };
  }
  return chunk;
}

std::optional<size_t> gradient_of(const ShardedModule& chunk, const at::Tensor& parameter) {
  const auto& gradients = chunk.reducer().gradients();
  const auto found = std::find_if(gradients.begin(), gradients.end(),
                                  [&](const Gradient& gradient) { return gradient.parameter.is_same(parameter); });
  if (found == gradients.end()) return std::nullopt;
  return found - gradients.begin();
}

at::Tensor main_grad(const ShardedModule& chunk, size_t gradient) {
  for (const auto& bucket : chunk.reducer().buckets()) {
    const auto& members = bucket.members();
    const auto place = std::find(members.begin(), members.end(), gradient);
    if (place == members.end()) continue;
    return bucket.present() ? bucket.view(place - members.begin()) : at::Tensor();
  }
  return {};
}

std::vector<ParameterRange> ranges(const ShardedModule& chunk, int rank) {
  const auto& reducer = chunk.reducer();
  std::vector<ParameterRange> list;
  for (size_t number = 0; number < reducer.buckets().size(); ++number) {
    const auto& bucket = reducer.buckets()[number];
    const auto& plan = reducer.reduction().plan();
    const auto kept = plan.kept(bucket, plan.place(rank));
    for (const auto& slice : bucket.layout().overlapping(kept)) {
      list.push_back({.name = reducer.gradients()[bucket.members()[slice.piece]].name,
                      .buffer = number,
                      .world = slice.in_flat,
                      .local = slice.in_flat.normalize(slice.in_flat.begin - kept.begin),
                      .parameter = slice.in_piece});
    }
  }
  return list;
}

}  // namespace shoal
