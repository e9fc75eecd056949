#include "shoal/zero.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iostream>
#include <map>
#include <unordered_map>

#include "engine/reducer/hooked_reduction.h"
#include "engine/wrapper/data_parallel_state.h"
#include "engine/wrapper/logging.h"
#include "shoal/error.h"
#include "shoal/group.h"
#include "shoal/hooks.h"
#include "strategy/zero/bucket_caps.h"
#include "strategy/zero/oss_state.h"

namespace shoal {

void ShardedDataParallelOptions::validate() const {
  std::vector<std::string> faults;
  if (reduce_buffer_size < 1) {
    faults.push_back(fmt::format("reduce_buffer_size {}: give at least 1 element", reduce_buffer_size));
  }
  if (buffer_hook && !broadcast_buffers) {
    faults.emplace_back(
        "buffer_hook replaces the broadcast of broadcast_buffers: set broadcast_buffers, or unset the hook");
  }
  if (reduce_fp16 && communication_hook) {
    faults.push_back(fmt::format("reduce_fp16 and communication_hook {} exclude each other: unset one of them",
                                 communication_hook->name()));
  }
  if (!faults.empty()) throw UsageError(fmt::format("ShardedDataParallel: {}", fmt::join(faults, "; ")));
}

using Owners = std::unordered_map<const c10::TensorImpl*, int>;

// What was true of the parameters when shares and buckets were made.
struct ShardedDataParallelCore::Sharding {
  struct Kind {
    bool trainable;
    at::ScalarType dtype;
    c10::Device device;
    bool operator==(const Kind&) const = default;
    bool like(const Kind& other) const { return dtype == other.dtype && device == other.device; }
  };
  std::vector<OSSCore*> optimizers;
  ShardedDataParallelOptions options;
  std::vector<Kind> kinds{};
  std::vector<int64_t> times_shared{};  // by optimizer
  Owners owners{};
  std::optional<int64_t> left_over{};  // the step that reduces what micro-batches had left of frozen parameters

  static std::vector<Kind> look(const ModuleTensors& tensors) {
    std::vector<Kind> kinds;
    for (const auto& entry : tensors.parameters) {
      kinds.push_back({entry.tensor.requires_grad(), entry.tensor.scalar_type(), entry.tensor.device()});
    }
    return kinds;
  }
};

namespace {

std::vector<std::string> describe_trainable(const ModuleTensors& tensors) {
  std::vector<std::string> lines;
  for (const auto& entry : tensors.parameters) {
    lines.push_back(entry.name + (entry.tensor.requires_grad() ? " trainable" : " frozen"));
  }
  return lines;
}

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
      fmt::format("ShardedDataParallel: the group of an OSS has ranks {} of the world, that of the wrapper ranks {}; "
                  "give both the same ranks in the same order",
                  fmt::join(theirs, ", "), fmt::join(ours, ", ")));
}

// Gradients of parameters that are trainable or were, see OSSShares.
std::vector<Gradient> shared_gradients(const ModuleTensors& tensors, const Owners& owners) {
  std::vector<Gradient> gradients;
  for (const auto& entry : tensors.parameters) {
    if (owners.contains(entry.tensor.unsafeGetTensorImpl())) {
      gradients.push_back({entry.name, entry.tensor, entry.sparse_gradient});
    } else if (entry.tensor.requires_grad()) {
      throw UsageError(fmt::format(
          "ShardedDataParallel: parameter {} belongs to no optimizer; add it to one, freeze it or ignore it",
          entry.name));
    }
  }
  return gradients;
}

// A gradient that no parameter has at present is hooked as well; it may have one in the next step.
class Unfrozen {
 public:
  explicit Unfrozen(const std::vector<Gradient>& gradients) {
    for (const auto& gradient : gradients) {
      if (!gradient.parameter.requires_grad()) frozen_.push_back(gradient.parameter.set_requires_grad(true));
    }
  }
  ~Unfrozen() {
    for (const auto& parameter : frozen_) parameter.set_requires_grad(false);
  }
  Unfrozen(const Unfrozen&) = delete;
  Unfrozen& operator=(const Unfrozen&) = delete;

 private:
  std::vector<at::Tensor> frozen_;
};

Owners owners_by_parameter(const std::vector<Gradient>& gradients, const std::vector<int>& owners) {
  Owners map;
  for (size_t i = 0; i < gradients.size(); ++i) map[gradients[i].parameter.unsafeGetTensorImpl()] = owners[i];
  return map;
}

// Sums of gradients go to the parameters' new owners. Collective.
void move_sums(const Group& group, const Reducer& reducer, const Owners& from, const Owners& to,
               AccumulatedGradients::Left& left) {
  const torch::NoGradGuard no_grad;
  std::vector<at::Tensor> moved;
  std::vector<int> here;
  for (const auto& gradient : reducer.gradients()) {
    const auto* parameter = gradient.parameter.unsafeGetTensorImpl();
    const auto before = from.find(parameter);
    if (before == from.end() || before->second == to.at(parameter)) continue;
    const auto& sum = left.gradients[parameter].sum;
    const bool mine = before->second == group.rank() && sum.exists;
    moved.push_back(gradient.parameter);
    here.push_back(mine && (sum.aside.defined() || gradient.parameter.grad().defined()) ? 1 : 0);
  }
  if (moved.empty()) return;
  const Label label{reducer.step(), -1, "sums of gradients that have another owner"};
  auto anywhere = at::tensor(here, at::kInt);
  group.all_reduce(anywhere, ReduceOp::max, label).wait();
  for (size_t i = 0; i < moved.size(); ++i) {
    const auto& parameter = moved[i];
    auto& sum = left.gradients[parameter.unsafeGetTensorImpl()].sum;
    sum.exists = anywhere.data_ptr<int>()[i] != 0;
    if (!sum.exists) continue;
    const int sender = from.at(parameter.unsafeGetTensorImpl());
    auto values = at::empty(parameter.sizes(), parameter.options().requires_grad(false));
    auto& grad = at::Tensor(parameter).mutable_grad();
    if (sender == group.rank()) {
      const auto own = sum.aside.defined() ? sum.aside : grad;
      values.copy_(own.is_sparse() ? own.to_dense() : own);
      if (!std::exchange(sum.aside, {}).defined()) grad.reset();
    }
    group.broadcast(values, sender, label).wait();
    if (to.at(parameter.unsafeGetTensorImpl()) != group.rank()) continue;
    (grad.defined() ? sum.aside : grad) = values;
  }
}

std::string describe_sizes(const Reducer& reducer, const std::vector<int>& owners, int ranks) {
  std::vector<int64_t> shares(ranks);
  int64_t model = 0;
  for (size_t i = 0; i < owners.size(); ++i) {
    const auto& parameter = reducer.gradients()[i].parameter;
    if (!parameter.requires_grad()) continue;
    shares[owners[i]] += parameter.numel();
    model += parameter.numel();
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
  state().adopts_buffers = options.broadcast_buffers;
  state().buffers.choose(options.broadcast_buffers, options.buffer_hook, options.buffer_hook_location);
  state().precision = options.precision;
  state().settings = {{"reduce_buffer_size", fmt::format("{}", options.reduce_buffer_size)},
                      {"reduce_fp16", yes_or_no(options.reduce_fp16)},
                      {"grad_reduce_in_fp32", yes_or_no(options.grad_reduce_in_fp32)},
                      {"broadcast_buffers", yes_or_no(options.broadcast_buffers)},
                      {"find_unused_parameters", yes_or_no(options.find_unused_parameters)},
                      {"auto_refresh_trainable", yes_or_no(options.auto_refresh_trainable)},
                      {"sync_models_at_startup", yes_or_no(options.sync_models_at_startup)},
                      {"precision", in_words(options.precision)},
                      {"buffer_hook", yes_or_no(options.buffer_hook != nullptr)},
                      {"ignored", fmt::format("{}", fmt::join(options.ignored, ", "))}};
  if (sharding_->optimizers.empty()) throw UsageError("ShardedDataParallel: give at least one OSS");
  for (const auto* optimizer : sharding_->optimizers) check_group(optimizer->group(), group);
  for (auto* optimizer : sharding_->optimizers) {
    if (optimizer->state_->lacks_trainable(optimizer->param_groups())) optimizer->refresh_trainable();
  }
  share();
}

// By parameter; which is in two optimizers is refused.
std::vector<int> ShardedDataParallelCore::share_gradients(std::vector<Gradient>& gradients) const {
  Owners owners;
  Owners twice;
  for (const auto* optimizer : sharding_->optimizers) {
    const auto& shares = optimizer->state_->shares;
    for (size_t i = 0; i < shares.parameters.size(); ++i) {
      const auto* parameter = shares.parameters[i].unsafeGetTensorImpl();
      if (!owners.emplace(parameter, shares.owners[i]).second) twice.emplace(parameter, 0);
    }
  }
  gradients = shared_gradients(state().tensors, owners);
  std::vector<int> list;
  for (const auto& gradient : gradients) {
    const auto* parameter = gradient.parameter.unsafeGetTensorImpl();
    if (twice.contains(parameter)) {
      throw UsageError(
          fmt::format("ShardedDataParallel: parameter {} is in two optimizers; remove it from one", gradient.name));
    }
    list.push_back(owners.at(parameter));
  }
  return list;
}

void ShardedDataParallelCore::prepare() {
  auto& sharding = *sharding_;
  const auto kinds = Sharding::look(state().tensors);
  const bool same_shares = sharding.times_shared == times_shared();
  if (kinds == sharding.kinds && same_shares) {
    if (sharding.left_over && *sharding.left_over < state().reducer->step()) freeze();
    return;
  }
  if (!sharding.options.auto_refresh_trainable) refuse_changes();
  const bool alike = same_shares && std::equal(kinds.begin(), kinds.end(), sharding.kinds.begin(),
                                               [](const auto& a, const auto& b) { return a.like(b); });
  if (alike && are_shares_balanced()) {
    agree(state().group, "which parameters are trainable", describe_trainable(state().tensors));
    freeze();
  } else if (same_shares) {
    refresh_trainable();
  } else {
    share();
  }
}

std::vector<int64_t> ShardedDataParallelCore::times_shared() const {
  std::vector<int64_t> times;
  for (const auto* optimizer : sharding_->optimizers) times.push_back(optimizer->state_->times_shared);
  return times;
}

// Whether every trainable parameter has an owner, and they need not move.
bool ShardedDataParallelCore::are_shares_balanced() const {
  size_t trainable = 0;
  for (const auto& gradient : state().reducer->gradients()) trainable += gradient.parameter.requires_grad() ? 1 : 0;
  if (trainable != state().tensors.trainable().size()) return false;
  return std::all_of(sharding_->optimizers.begin(), sharding_->optimizers.end(),
                     [](const OSSCore* optimizer) { return optimizer->state_->is_balanced(); });
}

void ShardedDataParallelCore::refuse_changes() const {
  const auto kinds = Sharding::look(state().tensors);
  constexpr const char* what_to_do =
      "and auto_refresh_trainable is off: call refresh_trainable() of the wrapper, on every rank, before forward";
  for (size_t i = 0; i < kinds.size(); ++i) {
    const auto& before = sharding_->kinds[i];
    const auto& name = state().tensors.parameters[i].name;
    if (kinds[i] == before) continue;
    if (kinds[i].trainable != before.trainable) {
      throw UsageError(fmt::format("ShardedDataParallel: parameter {} has been {} (requires_grad), {}", name,
                                   before.trainable ? "frozen" : "unfrozen", what_to_do));
    }
    throw UsageError(fmt::format("ShardedDataParallel: parameter {} is {} on {} now, {}", name,
                                 c10::toString(kinds[i].dtype), kinds[i].device.str(), what_to_do));
  }
  throw UsageError(fmt::format(
      "ShardedDataParallel: an OSS has changed its shares (refresh_trainable(), add_param_group()), {}", what_to_do));
}

void ShardedDataParallelCore::refresh_trainable() {
  for (auto* optimizer : sharding_->optimizers) optimizer->refresh_trainable();
  share();
}

// Buckets of what the optimizers share.
void ShardedDataParallelCore::share() {
  auto& state = this->state();
  const auto& options = sharding_->options;
  std::vector<Gradient> gradients;
  const auto owners = share_gradients(gradients);
  if (options.grad_reduce_in_fp32) widen(gradients);
  auto left = state.reducer ? state.reducer->left() : AccumulatedGradients::Left();
  const auto old_owners = std::exchange(sharding_->owners, owners_by_parameter(gradients, owners));
  const auto hook = options.reduce_fp16 ? std::make_shared<CompressHook>(at::kHalf) : options.communication_hook;
  const auto caps = sharded_bucket_caps(gradients, options, state.group.size());
  auto reduction =
      with_hook(std::make_unique<ReduceToOwner>(state.group, caps, owners), hook, gradients, "ShardedDataParallel");
  {
    const Unfrozen hooked(gradients);
    state.make_reducer(
        std::move(gradients),
        {.find_unused_parameters = options.find_unused_parameters,
         .about_sums =
             "which ShardedDataParallel has reduced to its owner's rank only: clip with OSS::clip_grad_norm(), read it "
             "on that rank (OSS::param_to_rank()), drop it with zero_grad(), update with OSS"},
        std::move(reduction));
  }
  move_sums(state.group, *state.reducer, old_owners, sharding_->owners, left);
  state.reducer->resume(left);
  sharding_->times_shared = times_shared();
  freeze();
  if (options.log_sizes && state.group.rank() == 0) {
    std::clog << describe_sizes(*state.reducer, owners, state.group.size()) << std::endl;
  }
}

void ShardedDataParallelCore::reduce() {
  state().reducer->settle();
  state().reducer->reduce_pending();
}

// What is frozen now rests, except where some rank has micro-batches' gradients of it that are not reduced yet.
void ShardedDataParallelCore::freeze() {
  auto& state = this->state();
  auto& reducer = *state.reducer;
  sharding_->kinds = Sharding::look(state.tensors);
  sharding_->left_over.reset();
  std::vector<bool> frozen;
  std::vector<int> left;
  for (size_t i = 0; i < reducer.gradients().size(); ++i) {
    frozen.push_back(!reducer.gradients()[i].parameter.requires_grad());
    left.push_back(frozen[i] && reducer.has_local(i) ? 1 : 0);
  }
  if (std::find(frozen.begin(), frozen.end(), true) != frozen.end()) {
    auto anywhere = at::tensor(left, at::kInt);
    state.group.all_reduce(anywhere, ReduceOp::max, {reducer.step(), -1, "gradients left of frozen parameters"}).wait();
    for (size_t i = 0; i < frozen.size(); ++i) {
      if (anywhere.data_ptr<int>()[i] == 0) continue;
      frozen[i] = false;
      sharding_->left_over = reducer.step();
    }
  }
  reducer.set_frozen(std::move(frozen));
}

}  // namespace shoal
