// Construction: ranks agree on the model and the buckets.

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <unordered_set>

#include "base/limits.h"
#include "engine/sharded/changed_values.h"
#include "engine/wrapper/data_parallel_state.h"
#include "engine/wrapper/module_checks.h"
#include "memory/views.h"
#include "shoal/error.h"
#include "shoal/group.h"
#include "strategy/decentralized/state.h"

namespace shoal {

using State = DecentralizedDataParallelCore::State;

namespace {

constexpr int64_t most_rounds = 16;  // number of rounds whose exchanges may keep copies

}  // namespace

void DecentralizedDataParallelOptions::validate(int ranks) const {
  std::vector<std::string> faults;
  const auto positive = [&](const char* name, double value, const char* unit) {
    if (!(value > 0)) faults.push_back(fmt::format("{} is {}: give {} above 0", name, value, unit));
  };
  positive("bucket_cap_mb", bucket_cap_mb, "MiB");
  positive("neighbour_timeout_seconds", neighbour_timeout_seconds, "seconds");
  if (clip_grad < 0 || !std::isfinite(clip_grad)) {
    faults.push_back(fmt::format("clip_grad is {}: give a norm, or 0 for no clipping", clip_grad));
  }
  if (clip == ClipScope::bucket && scaler) {
    faults.emplace_back(
        "clip per bucket does not work with a scaler, because updates wait for the last gradient; use "
        "ClipScope::all_gradients");
  }
  if (topology && topology->size() != ranks) {
    faults.push_back(fmt::format("topology {} is for {} ranks, the group has {}: make_topology(name, group.size())",
                                 topology->name(), topology->size(), ranks));
  }
  if (exchange_dtype && !at::isFloatingType(*exchange_dtype)) {
    faults.push_back(fmt::format("exchange_dtype {}: give a floating-point one", toString(*exchange_dtype)));
  }
  if (exchange_dtype && topology && topology->kind() == Stochastic::column) {
    faults.emplace_back(
        "exchange_dtype is not supported for push-sum, whose weights are sent with the values and must not be rounded");
  }
  if (compressed_exchange) {
    const auto& how = *compressed_exchange;
    const auto part = [&](const char* name, const std::optional<double>& value) {
      if (value && !(*value > 0 && *value <= 1)) {
        faults.push_back(fmt::format("compressed_exchange: {} is {}: give more than 0 and at most 1", name, *value));
      }
    };
    part("top_k", how.top_k);
    part("rate", how.rate);
    if (exchange_dtype)
      faults.emplace_back("exchange_dtype and compressed_exchange exclude each other: set one of them");
    if (pre_average_hook) {
      faults.emplace_back(
          "pre_average_hook is not supported with compressed_exchange, which has no sum of neighbours' values");
    }
    if (topology && (topology->kind() != Stochastic::doubly || topology->period() > most_rounds)) {
      faults.push_back(
          fmt::format("compressed_exchange keeps copies per round: topology {} is {} stochastic with {} "
                      "rounds; give a doubly stochastic one of at most {}",
                      topology->name(), to_string(topology->kind()), topology->period(), most_rounds));
    }
  }
  if (!faults.empty()) throw UsageError(fmt::format("DecentralizedDataParallel: {}", fmt::join(faults, "; ")));
}

std::vector<std::string> describe(const DecentralizedDataParallelOptions& options) {
  const auto& compressed = options.compressed_exchange;
  std::vector<std::string> lines{
      fmt::format("bucket_cap_mb {}", options.bucket_cap_mb),
      fmt::format("exchange_dtype {}", options.exchange_dtype ? toString(*options.exchange_dtype) : "none"),
      compressed ? fmt::format("compressed_exchange with top_k {}, rate {}", compressed->top_k.value_or(1),
                               compressed->rate.value_or(0))
                 : "no compressed_exchange",
      fmt::format("average_buffers {}", options.average_buffers)};
  if (const auto& scaler = options.scaler) {
    lines.push_back(fmt::format(
        "scaler with initial_scale {}, dynamic {}, growth {} after {} steps, backoff {} after {}, min_scale {}",
        scaler->initial_scale, scaler->dynamic, scaler->growth_factor, scaler->growth_interval, scaler->backoff_factor,
        scaler->hysteresis, scaler->min_scale));
  } else {
    lines.emplace_back("no scaler");
  }
  return lines;
}

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

std::string loaded_alone(const std::string& parameter, int rank) {
  return fmt::format(
      "DecentralizedDataParallel: parameter {} has been loaded or replaced on rank {}, and neighbours would mix what "
      "that rank had before into it; when all ranks have loaded, call global_avg() on all of them",
      parameter, rank);
}

std::optional<GradScaler> make_scaler(const DecentralizedDataParallelOptions& options) {
  return options.scaler ? std::optional<GradScaler>(*options.scaler) : std::nullopt;
}

}  // namespace

State::State(std::shared_ptr<torch::nn::Module> of, OptimizerOfNamed maker, const Group& over, ModuleTensors walked,
             const DecentralizedDataParallelOptions& chosen)
    : module(std::move(of)),
      make(std::move(maker)),
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
  if (!make) throw UsageError("DecentralizedDataParallel: the optimizer factory is empty");
  if (!joins_again(group)) agree(group, "the options of DecentralizedDataParallel", describe(options));
  const auto parameters = parameters_of(gradients);
  for (const auto& parameter : parameters) {
    if (options.param_as_bucket_view) homes.push_back(home_of(parameter));
  }
  watch = ParameterWatch(parameters);
  mixing.admit_with([this](const Group& pair) { hand_over(pair); });
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
        "ranks, and pass() on one that has no batch",
        fmt::join(without, ", ")));
  }
  mixing.known().all_weigh(given);
}

void State::require_that_all_go_on(int64_t version) const {
  const auto stopped = mixing.stopped_before(version);
  if (!stopped) return;
  const auto [rank, gradient] = *stopped;
  throw UsageError(loaded_alone(gradient < gradients.size() ? gradients[gradient].name : "?", group.world_rank(rank)));
}

// Before the first step ranks agree on their initial values; later a rank that alone replaces values must stop, because
// neighbours still have the old ones.
void State::meet_changes() {
  for (const auto& bucket : buckets) bucket.require_kinds();
  const bool loaded = loads.changed(watch.parameters());
  if (!loaded) loads.clear();
  if (!loaded && !watch.changed()) return;
  if (buckets.empty() || group.size() == 1) separate();
  std::vector<ChangedValue> values;
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!loaded && !watch.changed(i)) continue;
    values.push_back({gradients[i].name, digest_of(gradients[i].parameter)});
    if (buckets.empty() || group.size() == 1) continue;
    mixing.stop(static_cast<uint32_t>(i));
    throw UsageError(loaded_alone(gradients[i].name, group.world_rank(group.rank())));
  }
  if (!values.empty() && buckets.empty()) agree_on_values(group, values);
  watch.note();
  loads.clear();
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

std::vector<GossipBucket> State::equipped_parts() const {
  auto list = parts();
  for (auto& bucket : list) {
    equip(bucket);
    if (pending) load_into(bucket, *pending);
  }
  return list;
}

void State::equip(GossipBucket& bucket) const {
  bucket.optimizer = make(bucket.members());
  if (!bucket.optimizer) throw UsageError("DecentralizedDataParallel: the optimizer factory returned nullptr");
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

void State::separate() {
  if (homes.empty()) return;
  const torch::NoGradGuard no_grad;
  std::vector<at::Tensor> replaced;
  std::unordered_set<const c10::StorageImpl*> on_homes;
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!same_storage(gradients[i].parameter, homes[i])) replaced.push_back(gradients[i].parameter);
  }
  if (replaced.empty()) return;
  std::vector<NamedTensor> named;
  for (const auto& gradient : gradients) {
    named.push_back({.name = gradient.name, .aliases = {}, .tensor = gradient.parameter});
  }
  require_separate_memory(named, {}, "DecentralizedDataParallel");
  for (const auto& home : homes) on_homes.insert(home.storage().unsafeGetStorageImpl());
  for (const auto& parameter : replaced) {
    const bool on_home = on_homes.contains(parameter.storage().unsafeGetStorageImpl());
    if (on_home) parameter.set_data(parameter.detach().clone());
  }
}

void State::show_all() {
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
