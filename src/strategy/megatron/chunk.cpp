#include "strategy/megatron/chunk.h"

#include <algorithm>

#include "engine/reducer/hooked_reduction.h"
#include "engine/sharded/ownership.h"
#include "engine/wrapper/data_parallel_state.h"
#include "strategy/megatron/bucket_caps.h"

namespace shoal {
namespace {

const char* about_sums(const DistributedOptimizerOptions& options) {
  if (options.overlap_grad_reduce) {
    return "which DistributedOptimizer has reduced to shards on the ranks: clip with its option clip_grad, read "
           "main_grad(), drop it with zero_grad(), update with its step()";
  }
  return "which DistributedOptimizer reduces to shards in step() or reduce_model_grads(): clip with its option "
         "clip_grad, read this rank's own before that in main_grad(), drop it with zero_grad(), update with its step()";
}

std::unique_ptr<GradientReduction> make_reduction(const std::vector<Gradient>& gradients, const Group& group,
                                                  const DistributedOptimizerOptions& options, bool cut) {
  const auto caps = buffer_caps(gradients, options);
  if (cut) return std::make_unique<ReduceScatter>(group, caps);
  std::vector<at::Tensor> parameters;
  for (const auto& gradient : gradients) parameters.push_back(gradient.parameter);
  std::vector<int> owners(parameters.size(), -1);
  assign_owners(parameters, group.size(), owners);
  return std::make_unique<ReduceToOwner>(group, caps, std::move(owners), /*follow=*/false);
}

}  // namespace

std::shared_ptr<ShardedModule> make_chunk(const ModuleTensors& tensors, const Group& group,
                                          const DistributedOptimizerOptions& options, bool cut,
                                          const std::string& prefix) {
  auto gradients = gradients_of(tensors);
  for (auto& gradient : gradients) gradient.sparse = false;  // buffers are dense
  if (options.grad_reduce_in_fp32) widen(gradients);
  auto reduction = with_hook(make_reduction(gradients, group, options, cut), options.communication_hook, gradients,
                             "DistributedOptimizer", prefix);
  auto reducer =
      std::make_shared<Reducer>(std::move(gradients), group,
                                ReducerOptions{.find_unused_parameters = true,
                                               .leave_grad = false,
                                               .about_sums = about_sums(options),
                                               .timers = options.overlap_grad_reduce ? options.timers : nullptr},
                                std::move(reduction));
  std::vector<std::unique_ptr<ParameterGather>> gathers;
  for (const auto& bucket : reducer->buckets()) {
    auto parameters = reducer->parameters_of(bucket);
    gathers.push_back(options.reuse_grad_buf_for_param_gather
                          ? gather_in_gradients(group, std::move(parameters), bucket)
                          : gather_in_parameters(group, std::move(parameters), bucket.layout(),
                                                 reducer->owners_of(bucket, group.size()),
                                                 {-1, -1, "parameters of DistributedOptimizer"}));
  }
  auto chunk = std::make_shared<ShardedModule>(group, std::move(reducer), std::move(gathers),
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
    const auto kept = reducer.reduction().plan().kept(bucket, rank);
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
