#include "shoal/strategy/zero/sharded_ddp.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <iostream>
#include <map>
#include <set>

#include "engine/data_parallel_state.h"
#include "engine/hooked_exchange.h"
#include "engine/logging.h"
#include "shoal/base/error.h"
#include "shoal/engine/hooks/compress.h"
#include "strategy/zero/bucket_caps.h"

namespace shoal {

void ShardedDataParallelOptions::validate() const {
  std::vector<std::string> faults;
  if (reduce_buffer_size < 1) {
    faults.push_back(fmt::format("reduce_buffer_size {}: give at least 1 element", reduce_buffer_size));
  }
  if (buffer_hook && !broadcast_buffers) {
    faults.emplace_back("buffer_hook takes the place of broadcast_buffers: leave that on, or unset the hook");
  }
  if (reduce_fp16 && communication_hook) {
    faults.push_back(fmt::format("reduce_fp16 is a communication hook of its own, and {} is given: leave one of them",
                                 communication_hook->name()));
  }
  if (!faults.empty()) throw UsageError(fmt::format("ShardedDataParallel: {}", fmt::join(faults, "; ")));
}

// What was true of the parameters when shares and buckets were made.
struct ShardedDataParallelCore::Sharding {
  struct Kind {
    bool trainable;
    at::ScalarType dtype;
    c10::Device device;
    bool operator==(const Kind&) const = default;
  };
  std::vector<OSSCore*> optimizers;
  ShardedDataParallelOptions options;
  std::vector<Kind> kinds{};

  static std::vector<Kind> look(const ModuleTensors& tensors) {
    std::vector<Kind> kinds;
    for (const auto& entry : tensors.parameters) {
      kinds.push_back({entry.tensor.requires_grad(), entry.tensor.scalar_type(), entry.tensor.device()});
    }
    return kinds;
  }
};

namespace {

void check_devices(const ModuleTensors& tensors) {
  std::map<std::string, std::string> types;
  for (const auto& entry : tensors.parameters)
    types.emplace(c10::DeviceTypeName(entry.tensor.device().type()), entry.name);
  if (types.size() < 2) return;
  std::vector<std::string> list;
  for (const auto& [type, name] : types) list.push_back(fmt::format("{} ({})", type, name));
  throw UsageError(
      fmt::format("ShardedDataParallel: parameters are on devices of several types, {}; move the model to one",
                  fmt::join(list, ", ")));
}

std::vector<int> world_ranks(const Group& group) {
  std::vector<int> ranks;
  for (int rank = 0; rank < group.size(); ++rank) ranks.push_back(group.world_rank(rank));
  return ranks;
}

// A gradient goes to the rank that has its owner's number, so both must number the same ranks alike.
void check_group(const Group& of_optimizer, const Group& of_wrapper) {
  const auto theirs = world_ranks(of_optimizer);
  const auto ours = world_ranks(of_wrapper);
  if (theirs == ours) return;
  throw UsageError(
      fmt::format("ShardedDataParallel: an OSS over ranks {} of the world, the wrapper over ranks {}; give both one "
                  "group, with the same ranks in the same order",
                  fmt::join(theirs, ", "), fmt::join(ours, ", ")));
}

// The owner of each trainable parameter, over all optimizers.
std::vector<int> owners_of(const std::vector<Gradient>& gradients, const std::vector<OSSCore*>& optimizers,
                           const Group& group) {
  if (optimizers.empty()) throw UsageError("ShardedDataParallel: give at least one OSS");
  std::map<const c10::TensorImpl*, int> owners;
  std::set<const c10::TensorImpl*> twice;
  for (const auto* optimizer : optimizers) {
    check_group(optimizer->group(), group);
    const auto shares = optimizer->partition();
    for (size_t rank = 0; rank < shares.size(); ++rank) {
      for (const auto& parameter : shares[rank]) {
        if (!owners.emplace(parameter.unsafeGetTensorImpl(), static_cast<int>(rank)).second) {
          twice.insert(parameter.unsafeGetTensorImpl());
        }
      }
    }
  }
  std::vector<int> list;
  for (const auto& gradient : gradients) {
    const auto* parameter = gradient.parameter.unsafeGetTensorImpl();
    if (twice.count(parameter) > 0) {
      throw UsageError(
          fmt::format("ShardedDataParallel: parameter {} is in two optimizers; leave it in one", gradient.name));
    }
    const auto owner = owners.find(parameter);
    if (owner == owners.end()) {
      throw UsageError(
          fmt::format("ShardedDataParallel: parameter {} belongs to no optimizer; add it to one, freeze it "
                      "or ignore it",
                      gradient.name));
    }
    list.push_back(owner->second);
  }
  return list;
}

std::string describe_sizes(const Reducer& reducer, const std::vector<int>& owners, int ranks) {
  std::vector<int64_t> shares(ranks);
  int64_t model = 0;
  for (size_t i = 0; i < owners.size(); ++i) {
    const auto numel = reducer.gradients()[i].parameter.numel();
    shares[owners[i]] += numel;
    model += numel;
  }
  if (ranks == 1) {
    return fmt::format("ShardedDataParallel: {} trainable elements on one rank; gradients are not grouped in buckets",
                       model);
  }
  std::vector<int64_t> buckets;
  for (const auto& bucket : reducer.buckets()) {
    int64_t numel = 0;
    for (const auto& parameter : reducer.parameters_of(bucket)) numel += parameter.numel();
    buckets.push_back(numel);
  }
  const auto [least, most] = std::minmax_element(buckets.begin(), buckets.end());
  return fmt::format(
      "ShardedDataParallel: {} trainable elements, in shares of {} by rank; {} buckets of {} to {} elements", model,
      fmt::join(shares, ", "), buckets.size(), *least, *most);
}

}  // namespace

ShardedDataParallelCore::ShardedDataParallelCore(std::shared_ptr<torch::nn::Module> module,
                                                 std::vector<OSSCore*> optimizers, const Group& group,
                                                 const ShardedDataParallelOptions& options)
    : DataParallelCore([&] {
        options.validate();
        if (module) check_devices(walk(*module, options.ignored));
        return wrap(std::move(module), group, "ShardedDataParallel", options.ignored, options.sync_models_at_startup);
      }()),
      sharding_(std::make_shared<Sharding>(Sharding{.optimizers = std::move(optimizers), .options = options})) {
  state().buffers.choose(options.broadcast_buffers, options.buffer_hook, options.buffer_hook_location);
  state().precision = options.precision;
  state().settings = {{"reduce_buffer_size", fmt::format("{}", options.reduce_buffer_size)},
                      {"reduce_fp16", yes_or_no(options.reduce_fp16)},
                      {"grad_reduce_in_fp32", yes_or_no(options.grad_reduce_in_fp32)},
                      {"broadcast_buffers", yes_or_no(options.broadcast_buffers)},
                      {"find_unused_parameters", yes_or_no(options.find_unused_parameters)},
                      {"auto_refresh_trainable", yes_or_no(options.auto_refresh_trainable)},
                      {"ignored", fmt::format("{}", fmt::join(options.ignored, ", "))}};
  refresh_trainable();
}

void ShardedDataParallelCore::prepare() {
  if (!sharding_->options.auto_refresh_trainable || sharding_->kinds == Sharding::look(state().tensors)) return;
  for (auto* optimizer : sharding_->optimizers) optimizer->refresh_trainable();
  refresh_trainable();
}

void ShardedDataParallelCore::refresh_trainable() {
  auto& state = this->state();
  const auto& options = sharding_->options;
  auto gradients = gradients_of(state.tensors);
  if (options.grad_reduce_in_fp32) widen(gradients);
  const auto hook = options.reduce_fp16 ? std::make_shared<CompressHook>(at::kHalf) : options.communication_hook;
  const auto owners = owners_of(gradients, sharding_->optimizers, state.group);
  const auto caps = sharded_bucket_caps(gradients, options, state.group.size());
  auto exchange =
      with_hook(std::make_unique<ReduceToOwner>(state.group, caps, owners), hook, gradients, "ShardedDataParallel");
  state.make_reducer(std::move(gradients),
                     {.find_unused_parameters = options.find_unused_parameters,
                      .about_sums = "whose sum ShardedDataParallel leaves on its owner's rank alone: clip with "
                                    "OSS::clip_grad_norm(), read it on that rank (OSS::param_to_rank()), drop it with "
                                    "zero_grad(), update with OSS"},
                     std::move(exchange));
  sharding_->kinds = Sharding::look(state.tensors);
  if (options.log_sizes && state.group.rank() == 0) {
    std::clog << describe_sizes(*state.reducer, owners, state.group.size()) << std::endl;
  }
}

}  // namespace shoal
