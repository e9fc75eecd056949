// Construction: ranks agree on the model and the buckets.

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <algorithm>
#include <numeric>

#include "base/limits.h"
#include "checkpoint/on_all_ranks.h"
#include "engine/wrapper/data_parallel_state.h"
#include "memory/views.h"
#include "shoal/error.h"
#include "shoal/group.h"
#include "strategy/decentralized/state.h"

namespace shoal {

using State = DecentralizedDataParallelCore::State;

namespace {

std::vector<at::Tensor> parameters_of(const std::vector<Gradient>& gradients) {
  std::vector<at::Tensor> parameters;
  for (const auto& gradient : gradients) {
    if (gradient.parameter.is_complex()) {
      throw UsageError(
          fmt::format("parameter {} is complex: hold it as a real tensor with a last dimension of 2 "
                      "(view_as_real)",
                      gradient.name));
    }
    parameters.push_back(gradient.parameter);
  }
  return parameters;
}

std::optional<GradScaler> make_scaler(const DecentralizedDataParallelOptions& options) {
  return options.scaler ? std::optional<GradScaler>(*options.scaler) : std::nullopt;
}

// The part of the recipe's groups that is in a bucket.
OptimizerRecipe::ParamGroups groups_in(const std::vector<NamedParameter>& members, const OptimizerRecipe& recipe,
                                       const torch::nn::Module& module) {
  if (!recipe.groups) {
    std::vector<at::Tensor> parameters;
    for (const auto& member : members) parameters.push_back(member.parameter);
    OptimizerRecipe::ParamGroups whole;
    whole.emplace_back(std::move(parameters));
    return whole;
  }
  auto groups = recipe.groups(module);
  for (auto& group : groups) {
    std::erase_if(group.params(), [&](const at::Tensor& parameter) {
      return std::none_of(members.begin(), members.end(),
                          [&](const NamedParameter& member) { return member.parameter.is_same(parameter); });
    });
  }
  return groups;
}

// Nothing else could train a parameter that is in none: its gradient is dropped in backward.
void require_in_groups(const std::vector<Gradient>& gradients, const OptimizerRecipe& recipe,
                       const torch::nn::Module& module) {
  if (!recipe.groups) return;
  const auto groups = recipe.groups(module);
  std::vector<std::string> left_out;
  for (const auto& gradient : gradients) {
    const bool in = std::any_of(groups.begin(), groups.end(), [&](const auto& group) {
      return std::any_of(group.params().begin(), group.params().end(),
                         [&](const at::Tensor& parameter) { return parameter.is_same(gradient.parameter); });
    });
    if (!in) left_out.push_back(gradient.name);
  }
  if (left_out.empty()) return;
  throw UsageError(
      fmt::format("DecentralizedDataParallel: no param group has {}, so that nothing would train it: put it into a "
                  "group, freeze it (requires_grad_(false)) or name it in `ignored`",
                  fmt::join(left_out, ", ")));
}

}  // namespace

State::State(std::shared_ptr<torch::nn::Module> of, OptimizerRecipe of_optimizers, const Group& over,
             ModuleTensors walked, const DecentralizedDataParallelOptions& chosen)
    : module(std::move(of)),
      recipe(std::move(of_optimizers)),
      group(over),
      options(chosen),
      tensors(std::move(walked)),
      gradients(shoal::gradients_of(tensors)),
      spent(gradients, "DecentralizedDataParallel",
            "which DecentralizedDataParallel has used for its update in backward: clip with its option clip_grad, read "
            "the norm from last_norm(), read or change gradients in a hook of the parameter (register_hook)"),
      mixing(over, options.topology ? *options.topology : make_topology("one-peer-exp", over.size()),
             options.neighbour_timeout_seconds),
      scaler(make_scaler(options)),
      expected(gradients.size(), 0),
      tracker(gradients, {}, *this) {
  if (!recipe.make) {
    throw UsageError(
        "DecentralizedDataParallel: the optimizer's recipe is empty: make it by optimizer_recipe<Optimizer>(options)");
  }
  if (!joins_again(group)) agree(group, "the options of DecentralizedDataParallel", describe(options));
  const auto require = [this] { require_in_groups(gradients, recipe, *module); };
  joins_again(group) ? require() : on_all_ranks(group, "param groups", require);
  const auto parameters = parameters_of(gradients);
  for (const auto& parameter : parameters) {
    if (options.param_as_bucket_view) homes.push_back(home_of(parameter));
  }
  watch = ParameterWatch(parameters);
  mixing.admit_with([this](const Group& pair) { send_state_to(pair); });
  if (scaler) scale.emplace(*scaler);
}

void State::tell_weights() {
  constexpr double passes = -1;
  constexpr double gives_none = -2;
  const auto own = weights == Weights::given ? weight : weights == Weights::none ? gives_none : passes;
  auto all = at::empty({group.size()}, at::kDouble);
  group.all_gather(all, at::full({1}, own, at::kDouble), {step, -1, "weights"}).wait();
  std::vector<double> given(all.data_ptr<double>(), all.data_ptr<double>() + group.size());
  if (std::none_of(given.begin(), given.end(), [](double one) { return one >= 0; })) return;
  std::vector<int> without;
  for (int rank = 0; rank < group.size(); ++rank) {
    if (given[rank] == gives_none) without.push_back(group.world_rank(rank));
    given[rank] = std::max(given[rank], 0.0);
  }
  if (!without.empty()) {
    throw DisagreeError(fmt::format(
        "rank {} called the loss's own backward(), others backward(loss_sum, weight): use either one on all "
        "ranks, and step_without_update() on one that has no batch",
        fmt::join(without, ", ")));
  }
  mixing.known().all_weigh(given);
}

// Uses rank 0's order; other ranks may have used other parameters, or in another order.
void State::build_buckets(std::vector<size_t> order) {
  auto whole = at::empty({static_cast<int64_t>(gradients.size())}, at::kLong);
  std::vector<bool> seen(gradients.size(), false);
  for (const auto gradient : order) seen[gradient] = true;
  for (size_t i = gradients.size(); i-- > 0;) {
    if (!seen[i]) order.push_back(i);  // backward reaches the last registered layer first
  }
  for (size_t i = 0; i < order.size(); ++i) whole[static_cast<int64_t>(i)] = static_cast<int64_t>(order[i]);
  group.broadcast(whole, 0, {step, -1, "order of gradients"}).wait();
  for (size_t i = 0; i < order.size(); ++i) order[i] = whole[static_cast<int64_t>(i)].item<int64_t>();
  make_buckets(order);
}

std::vector<GossipBucket> State::parts() const {
  std::vector<size_t> all(gradients.size());
  std::iota(all.begin(), all.end(), 0);
  const auto cap = bytes_of_mebibytes(options.bucket_cap_mb);
  std::vector<GossipBucket> list;
  for (const auto& members : plan_buckets(gradients, all, cap, cap)) {
    std::vector<NamedParameter> named;
    for (const auto member : members) named.push_back({gradients[member].name, gradients[member].parameter});
    list.emplace_back(std::move(named));
  }
  return list;
}

std::vector<GossipBucket> State::buckets_with_optimizers() const {
  auto list = parts();
  for (auto& bucket : list) {
    equip(bucket);
    if (pending) load_into(bucket, *pending);
  }
  return list;
}

void State::equip(GossipBucket& bucket) const {
  bucket.optimizer = recipe.make(groups_in(bucket.members(), recipe, *module));
  if (!bucket.optimizer) throw UsageError("DecentralizedDataParallel: the optimizer's recipe returned nullptr");
  if (options.schedule) bucket.schedule = options.schedule(*bucket.optimizer);
}

void State::make_buckets(const std::vector<size_t>& order) {
  const auto cap = bytes_of_mebibytes(options.bucket_cap_mb);
  bucket_of.resize(gradients.size());
  std::vector<GossipBuffer> buffers;
  for (const auto& planned : plan_buckets(gradients, order, cap, cap)) {
    std::vector<NamedParameter> named;
    std::vector<at::Tensor> homes_of_named;
    for (const auto member : planned) {
      bucket_of[member] = buckets.size();
      named.push_back({gradients[member].name, gradients[member].parameter});
      if (homes.empty()) continue;
      // One that has been replaced since wrapping may have another dtype, too.
      if (!same_storage(named.back().parameter, homes[member])) homes[member] = home_of(named.back().parameter);
      homes_of_named.push_back(homes[member]);
    }
    members.push_back(planned);
    auto& bucket = buckets.emplace_back(std::move(named), std::move(homes_of_named));
    equip(bucket);
    buffers.push_back({bucket.numel(), bucket.dtype()});
  }
  progress.assign(buckets.size(), Progress::waiting);
  mixing.open(buffers, options.exchange_dtype, options.compressed_exchange);
  for (size_t i = 0; i < buckets.size(); ++i) {
    auto start = at::zeros({buckets[i].numel()}, at::TensorOptions(buckets[i].dtype()));
    buckets[i].write_to(start);
    mixing.all_hold(i, start);
  }
  watch.note();
  if (whole) whole->give_options(buckets);
  if (pending) load_pending();
}

void State::publish_all() {
  for (size_t i = 0; i < buckets.size(); ++i) {
    buckets[i].adopt();
    mixing.show(i, [&](const at::Tensor& flat, double scale) { buckets[i].write_to(flat, scale); });
  }
  mixing.end_step();
}

void State::load_pending() {
  const auto whole = std::move(*pending);
  pending.reset();
  for (auto& bucket : buckets) load_into(bucket, whole);
}

void State::load_into(GossipBucket& bucket, const OptimizerState& whole) const {
  OptimizerState part;
  for (const auto& member : bucket.members()) {
    if (const auto found = whole.find(member.name); found != whole.end()) part.insert(*found);
  }
  load_optimizer_state(*bucket.optimizer, *module, part, pending_dtypes);
}

}  // namespace shoal
