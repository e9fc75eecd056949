#include "shoal/zero.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iostream>
#include <map>

#include "engine/buckets/small_buckets.h"
#include "engine/changes/parameter_watch.h"
#include "engine/hooks/hook_use.h"
#include "engine/reducer/hooked_reduction.h"
#include "engine/wrapper/data_parallel_state.h"
#include "engine/wrapper/logging.h"
#include "shoal/error.h"
#include "shoal/group.h"
#include "shoal/hooks.h"
#include "strategy/zero/bucket_caps.h"
#include "strategy/zero/host_groups.h"
#include "strategy/zero/moved_sums.h"
#include "strategy/zero/oss_state.h"

namespace shoal {

// What was true of the parameters when shares and buckets were made.
struct ShardedDataParallelCore::Sharding {
  std::vector<OSSCore*> optimizers;
  ShardedDataParallelOptions options;
  ShardGroups groups;
  ParameterWatch watch{};
  std::vector<int64_t> times_shared{};  // by optimizer
  Owners owners{};
  std::shared_ptr<WrapperLife> life = std::make_shared<WrapperLife>();
  std::optional<int64_t> left_over{};  // the step that reduces what micro-batches had left of frozen parameters

  void take(const ShardGroups& made);
  void agree_over_hosts() const;
  void require_optimizers() const;
  // Whether owners must stay.
  bool is_elastic() const { return optimizers.front()->state().has_commit(); }
  bool other_dtype_or_device(size_t number) const { return watch.other_kind(number) && !watch.other_shape(number); }
  bool any_other_dtype_or_device() const;
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

// Those that ranks have in common.
LoggingData::Settings settings_of(const ShardedDataParallelOptions& options) {
  return {{"reduce_buffer_size", fmt::format("{}", options.reduce_buffer_size)},
          {"reduce_fp16", yes_or_no(options.reduce_fp16)},
          {"grad_reduce_in_fp32", yes_or_no(options.grad_reduce_in_fp32)},
          {"broadcast_buffers", yes_or_no(options.broadcast_buffers)},
          {"find_unused_parameters", yes_or_no(options.find_unused_parameters)},
          {"auto_refresh_trainable", yes_or_no(options.auto_refresh_trainable)},
          {"sync_models_at_startup", yes_or_no(options.sync_models_at_startup)},
          {"precision", in_words(options.precision)},
          {"communication_hook", in_words(options.communication_hook.get())},
          {"buffer_hook", in_words(options.buffer_hook.get(), options.buffer_hook_location)}};
}

std::string describe_sizes(const Reducer& reducer, const std::vector<int>& owners, const ShardGroups& groups) {
  std::vector<int64_t> shares(static_cast<size_t>(groups.owners));
  int64_t model = 0;
  for (size_t i = 0; i < owners.size(); ++i) {
    const auto& parameter = reducer.gradients()[i].parameter;
    if (!parameter.requires_grad()) continue;
    shares[owners[i]] += parameter.numel();
    model += parameter.numel();
  }
  if (groups.all.size() == 1) {
    return fmt::format("ShardedDataParallel: {} trainable elements on one rank; gradients are not grouped in buckets",
                       model);
  }
  std::vector<int64_t> buckets;
  for (const auto& bucket : reducer.buckets()) {
    int64_t numel = 0;
    for (const auto& parameter : reducer.buckets().parameters_of(bucket)) numel += parameter.numel();
    buckets.push_back(numel);
  }
  const auto [least, most] = std::minmax_element(buckets.begin(), buckets.end());
  return fmt::format(
      "ShardedDataParallel: {} trainable elements, in shares of {} by rank{}; {} buckets of {} to {} elements", model,
      fmt::join(shares, ", "), groups.replicated() ? " of each host" : "", buckets.size(), *least, *most);
}

}  // namespace

// All hosts must divide the parameters alike, also if they run different numbers of ranks.
void ShardedDataParallelCore::Sharding::take(const ShardGroups& made) {
  groups = made;
  if (!groups.replicated()) return;
  if (!options.sync_models_at_startup) {
    throw UsageError(
        "ShardedDataParallel: with OSS over by_host(), and sync_models_at_startup off, hosts may begin with different "
        "values: set it");
  }
  if (!groups.equal && (options.communication_hook || options.reduce_fp16)) {
    throw UsageError(
        "ShardedDataParallel: a communication_hook (or reduce_fp16) with OSS over by_host() needs equally many ranks "
        "on each host, as those that own the same call it: unset it, or start the same number on each");
  }
  for (auto* optimizer : optimizers) optimizer->state().replicate(groups.all, groups.owners, groups.equal, *optimizer);
}

// Hosts see only their own parameters change.
void ShardedDataParallelCore::Sharding::agree_over_hosts() const {
  for (auto* optimizer : optimizers) {
    auto& state = optimizer->state();
    const auto label = state.label("whether parameters were written");
    if (groups.all.all_reduce(state.has_new_values() ? 1 : 0, ReduceOp::max, label) == 0) continue;
    agree_on_values(groups.all, state.values());
    if (state.lone_watch) state.lone_watch->note();
  }
}

ShardedDataParallelCore::ShardedDataParallelCore(std::shared_ptr<torch::nn::Module> module,
                                                 std::vector<OSSCore*> optimizers, const Group& group,
                                                 const ShardedDataParallelOptions& options)
    : DataParallelCore([&] {
        options.validate();
        if (optimizers.empty()) throw UsageError("ShardedDataParallel: give at least one OSS");
        auto settings = settings_of(options);
        agree_on_settings(group, "ShardedDataParallel", settings);
        settings.emplace_back("ignored", fmt::format("{}", fmt::join(options.ignored, ", ")));
        if (module) check_devices(walk(*module, options.ignored));
        auto state =
            wrap(std::move(module), group, "ShardedDataParallel", options.ignored, options.sync_models_at_startup);
        require_constant_in_forward(state->tensors, state->name);
        state->settings = std::move(settings);
        return state;
      }()),
      sharding_(std::make_shared<Sharding>(
          Sharding{.optimizers = optimizers, .options = options, .groups = groups_of(optimizers, group)})) {
  auto& hook = sharding_->options.communication_hook;
  hook = in_use_by(state().name, *state().module, group, hook);
  sharding_->take(sharding_->groups);
  state().adopts_buffers = options.broadcast_buffers;
  state().buffers.choose(options.broadcast_buffers, options.buffer_hook, options.buffer_hook_location);
  state().precision = options.precision;
  for (auto* optimizer : sharding_->optimizers) {
    if (optimizer->state().lacks_trainable(optimizer->param_groups())) optimizer->refresh_trainable();
    optimizer->state().wrapper = sharding_->life;
  }
  share();
  sharding_->life->updated = state().reducer->step();
  sharding_->life->steps = [this] { return state().reducer->step(); };
}

ShardedDataParallelCore::~ShardedDataParallelCore() {
  auto& life = *sharding_->life;
  if (!life.optimizer_ended) {
    for (auto* optimizer : sharding_->optimizers) optimizer->state().second_shards.gradients.reset();
  }
  life.reduced = life.steps ? life.steps() : 0;
  life.steps = nullptr;
}

// Gradients of parameters that are trainable or were, see OSSShares; returns their owners.
std::vector<int> ShardedDataParallelCore::share_gradients(std::vector<Gradient>& gradients) const {
  std::vector<int> owners;
  for (const auto& entry : state().tensors.parameters) {
    std::vector<int> found;
    for (const auto* optimizer : sharding_->optimizers) {
      if (const auto owner = optimizer->state().shares.owner_of(entry.tensor)) found.push_back(*owner);
    }
    if (found.empty() && !entry.tensor.requires_grad()) continue;
    if (found.size() != 1) {
      throw UsageError(fmt::format("ShardedDataParallel: parameter {} {}", entry.name,
                                   found.empty() ? "belongs to no optimizer; add it to one, freeze it or ignore it"
                                                 : "is in two optimizers; remove it from one"));
    }
    gradients.push_back({entry.name, entry.tensor, entry.sparse_gradient});
    owners.push_back(found.front());
  }
  return owners;
}

void ShardedDataParallelCore::Sharding::require_optimizers() const {
  if (!life->optimizer_ended) return;
  throw UsageError(
      "ShardedDataParallel: an OSS that it was made with is gone, and with it the owners of the gradients: keep the "
      "optimizers as long as the wrapper");
}

bool ShardedDataParallelCore::Sharding::any_other_dtype_or_device() const {
  for (size_t number = 0; number < watch.parameters().size(); ++number) {
    if (other_dtype_or_device(number)) return true;
  }
  return false;
}

void ShardedDataParallelCore::prepare() {
  auto& sharding = *sharding_;
  sharding.require_optimizers();
  if (sharding.groups.replicated() && state().no_sync_depth == 0) sharding.agree_over_hosts();
  bool trainable = false;
  for (size_t number = 0; number < sharding.watch.parameters().size(); ++number) {
    trainable = trainable || sharding.watch.trainable_changed(number);
  }
  const bool kinds = sharding.any_other_dtype_or_device();
  const bool same_shares = sharding.times_shared == times_shared();
  if (!trainable && !kinds && same_shares) {
    if (sharding.left_over && *sharding.left_over < state().reducer->step()) freeze();
    return;
  }
  if (!sharding.options.auto_refresh_trainable) refuse_changes();
  if (same_shares && !kinds && are_shares_balanced()) {
    agree(state().group, "which parameters are trainable", describe_trainable(state().tensors));
    freeze();
  } else if (same_shares || !are_shares_balanced()) {
    refresh_trainable();
  } else {
    share();
  }
}

std::vector<int64_t> ShardedDataParallelCore::times_shared() const {
  std::vector<int64_t> times;
  for (const auto* optimizer : sharding_->optimizers) times.push_back(optimizer->state().times_shared);
  return times;
}

// Whether every trainable parameter has an owner, and they need not move.
bool ShardedDataParallelCore::are_shares_balanced() const {
  size_t trainable = 0;
  for (const auto& gradient : state().reducer->gradients()) trainable += gradient.parameter.requires_grad() ? 1 : 0;
  if (trainable != state().tensors.trainable().size()) return false;
  return std::all_of(sharding_->optimizers.begin(), sharding_->optimizers.end(),
                     [](const OSSCore* optimizer) { return optimizer->state().is_balanced(); });
}

void ShardedDataParallelCore::refuse_changes() const {
  std::string change = "an OSS has changed its shares (refresh_trainable(), add_param_group())";
  const auto& watch = sharding_->watch;
  for (size_t number = watch.parameters().size(); number-- > 0;) {  // the first one is named
    const auto& parameter = watch.parameters()[number];
    const auto& name = state().tensors.parameters[number].name;
    if (watch.trainable_changed(number)) {
      change = fmt::format("parameter {} has been {} (requires_grad)", name,
                           parameter.requires_grad() ? "unfrozen" : "frozen");
    } else if (sharding_->other_dtype_or_device(number)) {
      change = fmt::format("parameter {} is {} on {} now", name, c10::toString(parameter.scalar_type()),
                           parameter.device().str());
    }
  }
  throw UsageError(
      fmt::format("ShardedDataParallel: {}, and auto_refresh_trainable is off: call refresh_trainable() of the "
                  "wrapper, on every rank, before forward",
                  change));
}

void ShardedDataParallelCore::refresh_trainable() {
  sharding_->require_optimizers();
  if (sharding_->is_elastic() && are_shares_balanced() && !sharding_->any_other_dtype_or_device()) {
    agree(state().group, "which parameters are trainable", describe_trainable(state().tensors));
    return freeze();
  }
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
  auto left = sharding_->owners.empty() ? AccumulatedGradients::Left() : state.reducer->left();
  const auto old_owners = std::exchange(sharding_->owners, owners_by_parameter(gradients, owners));
  const auto hook = options.reduce_fp16 ? std::make_shared<CompressHook>(at::kHalf) : options.communication_hook;
  const auto& groups = sharding_->groups;
  const bool small = state.group.transport() == "host" && !groups.replicated() && !hook;
  if (groups.replicated()) {
    std::vector<std::string> lines;
    for (size_t i = 0; i < owners.size(); ++i) lines.push_back(fmt::format("{} {}", gradients[i].name, owners[i]));
    agree(state.group, "the owners of parameters on each host", lines);
  }
  const auto caps = sharded_bucket_caps(gradients, options, groups.owners, groups.all.size() == 1, small);
  auto reduction = with_hook(reduce_to_owners(groups, caps, owners), hook, gradients, "ShardedDataParallel");
  state.make_reducer(
      std::move(gradients),
      {.find_unused_parameters = options.find_unused_parameters,
       .about_sums =
           "which ShardedDataParallel has reduced to its owner's rank only: clip with the clip_grad_norm() of OSS, "
           "unscale it by OSS's step(scaler) (in Python with shoal.amp.GradScaler), read it on that rank, drop it with "
           "zero_grad(), update with OSS",
       .about_repeats = "call this backward under no_sync(), and reduce() after it",
       .limits = bucket_limits(small)},
      std::move(reduction));
  move_sums(groups.shard, *state.reducer, old_owners, sharding_->owners, left);
  state.reducer->resume(left);
  sharding_->times_shared = times_shared();
  freeze();
  send_to_second_owners();
  if (options.log_sizes && state.group.rank() == 0) {
    std::clog << describe_sizes(*state.reducer, owners, groups) << std::endl;
  }
}

void ShardedDataParallelCore::require_regroupable(const torch::optim::Optimizer& optimizer) const {
  const auto& all = sharding_->optimizers;
  if (all.size() > 1) throw UsageError("Elastic: a ShardedDataParallel with several optimizers is not supported");
  if (static_cast<const torch::optim::Optimizer*>(all.front()) != &optimizer) {
    throw UsageError("Elastic: the optimizer is not the one of this ShardedDataParallel");
  }
  if (sharding_->groups.replicated() && state().reducer->reduction().hook()) {
    throw UsageError("Elastic: ShardedDataParallel: a communication_hook between hosts is not supported");
  }
  state().require_regroupable();
}

void ShardedDataParallelCore::require_second_owners() const {
  if (!state().reducer->reduction().hook()) return;
  throw UsageError(
      "Elastic: ShardedDataParallel: a communication_hook or reduce_fp16 is not supported where parameters have second "
      "owners, on several hosts or over sockets: leave it out");
}

void ShardedDataParallelCore::send_to_second_owners() {
  for (auto* optimizer : sharding_->optimizers) {
    auto& second_shards = optimizer->state().second_shards;
    second_shards.gradients.reset();
    if (optimizer->has_second_owners()) second_shards.gradients = std::make_shared<SecondGradients>(state().reducer);
  }
}

void ShardedDataParallelCore::regroup(int64_t step) {
  auto& state = this->state();
  if (auto* hook = state.reducer->reduction().hook()) hook->reset();
  state.watch.note();  // the parameters have moved, on some hosts only
  state.group = sharding_->optimizers.front()->job();
  sharding_->take(groups_of(sharding_->optimizers, state.group));
  state.entered = false;
  state.buffers.forget_evaluation();
  sharding_->owners.clear();  // nothing is left; the former reducer stays until there is another one: this may fail
  share();
  state.reducer->count_from(step);
}

void ShardedDataParallelCore::reduce() {
  state().reducer->settle();
  state().reducer->reduce_pending();
}

// What is frozen now rests, except where some rank has micro-batches' gradients of it that are not reduced yet.
void ShardedDataParallelCore::freeze() {
  auto& state = this->state();
  auto& reducer = *state.reducer;
  std::vector<at::Tensor> parameters;
  for (const auto& entry : state.tensors.parameters) parameters.push_back(entry.tensor);
  sharding_->watch = ParameterWatch(std::move(parameters));
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
