#include "cli/plan/model_plan.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "cli/strategies/optimizers.h"
#include "cli/strategies/units.h"
#include "comm/transport/dry_run.h"
#include "data/reference.h"
#include "engine/reducer/hooked_reduction.h"
#include "engine/sharded/ownership.h"
#include "engine/wrapper/data_parallel_state.h"
#include "models/loss.h"
#include "module/units.h"
#include "shoal/group.h"
#include "strategy/ddp/ddp.h"
#include "strategy/fsdp/unit_reduction.h"
#include "strategy/megatron/bucket_caps.h"
#include "strategy/zero/bucket_caps.h"
#include "training/hook_text.h"
#include "training/wrapper_options.h"

namespace shoal::cli {
namespace {

// Order in which backward computes gradients.
std::vector<size_t> arrival_order(const TrainOptions& options, models::Model& model,
                                  const std::vector<Gradient>& gradients) {
  std::vector<at::Tensor> parameters;
  for (const auto& gradient : gradients) parameters.push_back(gradient.parameter);
  std::vector<size_t> order;
  const GradientHooks hooks(parameters, [&](size_t gradient) { order.push_back(gradient); });
  const auto precision = options.precision();
  auto sample = data::reference_batch(options.model, options.size, {}, 1, options.data_dtype());
  constexpr int64_t tokens = 4;  // of a text; the order is that of any length
  if (!sample.data.is_floating_point()) {
    sample = {sample.data.slice(1, 0, tokens), sample.target.slice(1, 0, tokens)};
  }
  at::Tensor logits;
  {
    const Precision::Scope scope(precision, at::kCPU);
    logits = model.forward(precision.input(sample.data));
  }
  models::loss_of(logits, sample.target).backward();
  model.zero_grad();
  return order;
}

int64_t element_bytes(const Gradient& gradient) {
  return static_cast<int64_t>(c10::elementSize(gradient.dtype()));
}

class Planner {
 public:
  Planner(const TrainOptions& options, PlannedModel& planned, int ranks)
      : options_(options),
        planned_(planned),
        model_(*planned.model),
        ranks_(ranks),
        group_(dry_run_group(ranks)),
        tensors_(walk(model_, {})),
        gradients_(gradients_of(tensors_)) {
    const auto kind = recipe_of(options);
    element_wise_ = kind.element_wise;
    const auto groups = kind.groups(model_);
    for (size_t number = 0; number < groups.size(); ++number) {
      for (const auto& parameter : groups[number].params()) param_groups_[parameter.unsafeGetTensorImpl()] = number;
    }
    plan_.ranks.resize(ranks);
    const bool shares = options.strategy != "ddp" && ranks > 1;
    plan_.parameters_once = shares && (options.transport == "auto" || options.transport == "host");
  }

  ModelPlan make() {
    assign_whole_parameters();
    plan_memory();
    std::vector<size_t> registered(gradients_.size());
    std::iota(registered.rbegin(), registered.rend(), 0);
    plan_.plain_steps = plain_steps(options_.compress());
    if (owns_pieces()) {
      plan_.per_step = plan_.plain_step = plan_.first_step = fsdp() ? fsdp_step() : megatron_step(registered);
      return plan_;
    }
    if (planned_.arrival.empty()) planned_.arrival = arrival_order(options_, model_, gradients_);
    const auto& arrived = planned_.arrival;
    plan_.first_step = wrapped_step(registered, make_hook(options_.compress()));
    plan_.plain_step = wrapped_step(arrived, make_hook(options_.compress()));
    plan_.per_step = wrapped_step(arrived, make_started_hook(options_.compress()));
    plan_.rebuild.add(static_cast<int64_t>(gradients_.size() * sizeof(int64_t)));
    return plan_;
  }

 private:
  using Buckets = std::vector<std::vector<size_t>>;

  bool fsdp() const { return options_.strategy == "fsdp"; }
  bool owns_pieces() const { return fsdp() || options_.strategy == "megatron"; }
  bool cut() const { return owns_pieces() && element_wise_; }

  void assign_whole_parameters() {
    for (const auto& gradient : gradients_) parameters_.push_back(gradient.parameter);
    std::vector<size_t> order(parameters_.size());
    std::iota(order.begin(), order.end(), 0);
    // OSS takes parameters in the order of its param groups.
    const auto group = [this](size_t i) { return param_groups_.at(parameters_[i].unsafeGetTensorImpl()); };
    if (!owns_pieces()) {
      std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return group(a) < group(b); });
    }
    std::vector<at::Tensor> listed;
    for (const auto i : order) listed.push_back(parameters_[i]);
    std::vector<int> owners(listed.size(), -1);
    assign_owners(listed, ranks_, owners);
    owners_.resize(owners.size());
    for (size_t place = 0; place < order.size(); ++place) owners_[order[place]] = owners[place];
    if (options_.strategy == "megatron") {
      for (auto& gradient : gradients_) gradient.sparse = false;  // buffers are dense
      if (options_.values().flag("grad_reduce_in_fp32")) widen(gradients_);
    }
    if (fsdp() && options_.values().flag("grad_reduce_in_fp32")) {
      for (auto& gradient : gradients_) gradient.reduce_dtype = at::kFloat;
    }
  }

  void plan_memory() {
    for (auto& rank : plan_.ranks) {
      for (const auto& entry : tensors_.parameters) rank.parameters += static_cast<int64_t>(entry.tensor.nbytes());
      for (const auto& entry : tensors_.buffers) rank.buffers += static_cast<int64_t>(entry.tensor.nbytes());
    }
    const bool whole_gradients = options_.strategy == "ddp" || options_.strategy == "zero1" || (cut() && !fsdp());
    for (size_t i = 0; i < gradients_.size(); ++i) {
      const auto bytes = parameters_[i].numel() * element_bytes(gradients_[i]);
      for (int rank = 0; rank < ranks_; ++rank) {
        auto& memory = plan_.ranks[rank];
        if (whole_gradients || (!cut() && owners_[i] == rank)) memory.gradients += bytes;
        const bool updates = options_.strategy == "ddp" || owners_[i] == rank;
        if (!cut() && updates) memory.state += state_bytes(parameters_[i].sizes(), parameters_[i]);
      }
    }
  }

  // State of a parameter, or of a piece of one, with these sizes.
  int64_t state_bytes(at::IntArrayRef sizes, const at::Tensor& parameter) const {
    const bool copied = owns_pieces() && parameter.element_size() < static_cast<int64_t>(sizeof(float));
    const auto element = copied ? static_cast<int64_t>(sizeof(float)) : parameter.element_size();
    const auto group = param_groups_.at(parameter.unsafeGetTensorImpl());
    return element * (state_numel(options_.optimizer, sizes, group) + (copied ? c10::multiply_integers(sizes) : 0));
  }

  PlannedCalls wrapped_step(std::span<const size_t> order, std::shared_ptr<CommunicationHook> hook) const {
    PlannedCalls calls;
    std::vector<at::Tensor> buffers;
    for (const auto& entry : tensors_.buffers) buffers.push_back(entry.tensor);
    for (const auto& chunk : coalesced(buffers)) {
      int64_t bytes = 0;
      for (const auto& tensor : chunk) bytes += static_cast<int64_t>(tensor.nbytes());
      calls.add(bytes);
    }
    std::unique_ptr<GradientReduction> reduction;
    if (options_.strategy == "zero2") {
      const auto caps = sharded_bucket_caps(gradients_, zero2_options(options_.values(), {}), ranks_);
      reduction = std::make_unique<ReduceToOwner>(group_, caps, owners_);
    } else {
      reduction = std::make_unique<AllReduce>(group_, bucket_caps(ddp_options(options_.values(), {})));
    }
    add_reductions(std::move(reduction), std::move(hook), order, calls);
    if (options_.strategy != "ddp") add_publication(calls);
    return calls;
  }

  // Publication of updated parameters that have one owner each.
  void add_publication(PlannedCalls& calls) const {
    add_meeting(calls);
    if (ranks_ == 1 || plan_.parameters_once) return;
    for (const auto& buffer : owned_buffers(parameters_, owners_, ranks_)) {
      add_broadcasts(buffer.ranges, static_cast<int64_t>(buffer.layout.element_bytes()), calls);
    }
  }

  // The synchronisation in step() before a rank writes parameters that others of its host may still read.
  void add_meeting(PlannedCalls& calls) const {
    if (options_.precision().scaler) {
      calls.add(sizeof(int32_t));  // whether some rank found inf or NaN
    } else if (plan_.parameters_once && ranks_ > 1) {
      calls.add(0);  // a barrier
    }
  }

  PlannedCalls megatron_step(std::span<const size_t> order) {
    PlannedCalls calls;
    const auto caps = buffer_caps(gradients_, megatron_options(options_.values(), {}));
    std::unique_ptr<GradientReduction> reduction;
    if (cut()) {
      reduction = std::make_unique<ReduceScatter>(group_, caps);
    } else {
      reduction = std::make_unique<ReduceToOwner>(group_, caps, owners_, /*follow=*/false);
    }
    const auto buckets = add_reductions(std::move(reduction), make_started_hook(options_.compress()), order, calls);
    add_meeting(calls);
    for (const auto& members : buckets) {
      const auto layout = layout_of(members, cut());
      std::vector<Range> ranges(ranks_);
      if (!cut()) ranges[owners_[members.front()]] = {0, layout.size()};
      for (int rank = 0; cut() && rank < ranks_; ++rank) {
        ranges[rank] = layout.part(rank);
        for (const auto& slice : layout.overlapping(ranges[rank])) {
          plan_.ranks[rank].state += state_bytes({slice.in_piece.size()}, parameters_[members[slice.piece]]);
        }
      }
      if (!plan_.parameters_once) add_broadcasts(ranges, parameters_[members.front()].element_size(), calls);
    }
    return calls;
  }

  PlannedCalls fsdp_step() {
    PlannedCalls calls;
    std::vector<int> units;
    const auto divided = divide(model_, tensors_, unit_policy(options_.model));
    for (const auto& parameter : parameters_) {
      for (size_t unit = 0; unit < divided.size(); ++unit) {
        for (const auto& entry : divided[unit].parameters) {
          if (entry.tensor.is_same(parameter)) units.push_back(static_cast<int>(unit));
        }
      }
    }
    std::vector<int> places(group_.size());
    std::iota(places.begin(), places.end(), 0);
    const ShardGroups groups{.all = group_, .shard = group_, .replicas = std::nullopt, .places = std::move(places)};
    std::unique_ptr<GradientReduction> reduction;
    if (cut()) {
      reduction = std::make_unique<ScatterUnits>(groups, units);
    } else {
      reduction = std::make_unique<ReduceUnitsToOwners>(groups, units, owners_);
    }
    const auto buckets = add_reductions(std::move(reduction), make_started_hook(options_.compress()), {}, calls);
    add_meeting(calls);
    plan_.gathers = ranks_ > 1 && !plan_.parameters_once;
    for (auto& rank : plan_.ranks) rank.parameters = plan_.gathers ? 0 : rank.parameters;
    for (const auto& members : buckets) {
      const auto layout = layout_of(members, cut());
      if (ranks_ == 1) add_broadcasts({{0, layout.size()}}, parameters_[members.front()].element_size(), calls);
      for (int rank = 0; rank < ranks_; ++rank) {
        const bool mine = cut() || owners_[members.front()] == rank;
        const auto range = cut() ? layout.part(rank) : Range{0, mine ? layout.size() : 0};
        for (const auto& slice : layout.overlapping(range)) {
          const auto& parameter = parameters_[members[slice.piece]];
          auto& memory = plan_.ranks[rank];
          if (plan_.gathers) memory.parameters += slice.in_piece.size() * parameter.element_size();
          if (!cut()) continue;
          memory.gradients += slice.in_piece.size() * element_bytes(gradients_[members[slice.piece]]);
          memory.state += state_bytes({slice.in_piece.size()}, parameter);
        }
      }
    }
    return calls;
  }

  FlatLayout layout_of(const std::vector<size_t>& members, bool scattered) const {
    std::vector<int64_t> numels;
    for (const auto member : members) numels.push_back(parameters_[member].numel());
    const auto bytes = static_cast<size_t>(element_bytes(gradients_[members.front()]));
    return scattered ? scatter_layout(numels, bytes, ranks_) : FlatLayout(numels, bytes);
  }

  // Runs the reduction and the hook on each bucket in a dry-run group.
  Buckets add_reductions(std::unique_ptr<GradientReduction> plain, std::shared_ptr<CommunicationHook> hook,
                         std::span<const size_t> order, PlannedCalls& calls) const {
    const torch::NoGradGuard no_grad;
    const auto reduction = with_hook(std::move(plain), std::move(hook), gradients_, "plan");
    const bool apart = reduction->plan().trailer_apart(gradients_);
    const auto before = group_.statistics();
    auto buckets = reduction->plan().buckets(gradients_, order);
    SpareMemory spare;
    for (size_t number = 0; number < buckets.size(); ++number) {
      Bucket bucket(gradients_, buckets[number], group_, reduction->plan(), !apart);
      bucket.acquire(group_, spare);
      auto sum = reduction->reduce(bucket, {0, static_cast<int64_t>(number), ""});
      for (sum.complete(); sum.next_stage; sum.complete()) sum = std::exchange(sum.next_stage, {})();
      sum = {};
      bucket.release(spare, /*keep=*/false);
    }
    const auto after = group_.statistics();
    calls.calls += after.calls - before.calls;
    calls.bytes += after.bytes - before.bytes;
    if (apart) calls.add(StepTrailer::numel(gradients_.size()) * static_cast<int64_t>(sizeof(float)));
    return buckets;
  }

  static void add_broadcasts(const std::vector<Range>& ranges, int64_t element_bytes, PlannedCalls& calls) {
    for (const auto& range : ranges) {
      if (!range.empty()) calls.add(range.size() * element_bytes);
    }
  }

  const TrainOptions& options_;
  PlannedModel& planned_;
  models::Model& model_;
  int ranks_;
  Group group_;
  ModuleTensors tensors_;
  std::vector<Gradient> gradients_;
  bool element_wise_ = false;
  std::map<const c10::TensorImpl*, size_t> param_groups_;
  std::vector<at::Tensor> parameters_;
  std::vector<int> owners_;
  ModelPlan plan_;
};

}  // namespace

ModelPlan plan_model(const TrainOptions& options, PlannedModel& planned, int ranks) {
  return Planner(options, planned, ranks).make();
}

}  // namespace shoal::cli
