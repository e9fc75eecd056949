#include "planning/strategy_plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "comm/group/coalesce.h"
#include "comm/transport/dry_run.h"
#include "engine/reducer/hooked_reduction.h"
#include "engine/sharded/ownership.h"
#include "engine/sharded/second_owners.h"
#include "engine/wrapper/data_parallel_state.h"
#include "module/units.h"
#include "planning/arrival.h"
#include "planning/state_bytes.h"
#include "shoal/group.h"
#include "strategy/ddp/ddp.h"
#include "strategy/fsdp/unit_reduction.h"
#include "strategy/megatron/bucket_caps.h"
#include "strategy/zero/bucket_caps.h"
#include "training/hook_text.h"
#include "training/parts.h"
#include "training/strategies/fsdp.h"
#include "training/wrapper_options.h"

namespace shoal {
namespace {

int64_t element_bytes(const Gradient& gradient) {
  return static_cast<int64_t>(c10::elementSize(gradient.dtype()));
}

class Planner {
 public:
  // parts: with the group of those that share one copy of the model. hosts: copies. second: by rank, of its shards;
  // empty: they have no second owners.
  Planner(TrainingParts parts, PlannedModule& planned, int hosts, bool one_host, std::vector<int> second)
      : parts_(std::move(parts)),
        planned_(planned),
        model_(*parts_.module),
        ranks_(parts_.group.size()),
        group_(parts_.group),
        tensors_(walk(model_, parts_.options.ignored)),
        gradients_(gradients_of(tensors_)),
        groups_(groups_of(parts_)),
        second_(std::move(second)),
        state_bytes_(parts_.recipe, groups_) {
    for (size_t number = 0; number < groups_.size(); ++number) {
      for (const auto& parameter : groups_[number].params()) param_groups_[parameter.unsafeGetTensorImpl()] = number;
    }
    for (const auto& entry : tensors_.trainable()) {
      if (param_groups_.contains(entry.tensor.unsafeGetTensorImpl())) continue;
      throw UsageError(
          fmt::format("plan: the recipe's param groups leave out parameter {}, which is trainable; add it to a "
                      "group, or freeze it",
                      entry.name));
    }
    plan_.strategy = parts_.strategy.name;
    plan_.ranks.resize(ranks_);
    plan_.hosts = hosts;
    if (hosts > 1) replicas_ = dry_run_group(hosts);
    plan_.parameters_once = (one_host || replicas_) && plan_.strategy != "ddp" && ranks_ > 1;
  }

  StrategyPlan make() {
    assign_whole_parameters();
    plan_memory();
    std::vector<size_t> registered(gradients_.size());
    std::iota(registered.rbegin(), registered.rend(), 0);
    plan_.plain_steps = plain_steps(compress());
    if (owns_pieces()) {
      plan_.per_step = plan_.plain_step = plan_.first_step = fsdp() ? fsdp_step() : megatron_step(registered);
      const auto of_host = plan_.ranks;
      for (int host = 1; host < plan_.hosts; ++host) {
        plan_.ranks.insert(plan_.ranks.end(), of_host.begin(), of_host.end());
      }
      return plan_;
    }
    if (planned_.arrival.empty()) {
      const auto& precision = parts_.options.precision;
      planned_.arrival = planned_.loss ? arrival_order(model_, gradients_, precision, planned_.loss) : registered;
    }
    const auto& arrived = planned_.arrival;
    plan_.first_step = wrapped_step(registered, make_hook(compress()));
    plan_.plain_step = wrapped_step(arrived, make_hook(compress()));
    plan_.per_step = wrapped_step(arrived, make_started_hook(compress()), /*counts_second=*/true);
    plan_.rebuild.add(static_cast<int64_t>(gradients_.size() * sizeof(int64_t)));
    add_second_owner_check();
    return plan_;
  }

 private:
  using Buckets = std::vector<std::vector<size_t>>;

  bool fsdp() const { return plan_.strategy == "fsdp" || plan_.strategy == "hybrid"; }
  bool owns_pieces() const { return fsdp() || plan_.strategy == "megatron"; }
  bool cut() const { return owns_pieces() && parts_.recipe.element_wise; }
  const std::string& compress() const { return parts_.values.text("compress"); }

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
    if (plan_.strategy == "megatron") {
      for (auto& gradient : gradients_) gradient.sparse = false;  // buffers are dense
    }
    if (!parts_.values.flag("grad_reduce_in_fp32")) return;
    if (!fsdp()) return widen(gradients_);
    for (auto& gradient : gradients_) gradient.reduce_dtype = reduce_dtype_of(parts_);
  }

  void plan_memory() {
    for (auto& rank : plan_.ranks) {
      for (const auto& entry : tensors_.parameters) rank.parameters += static_cast<int64_t>(entry.tensor.nbytes());
      for (const auto& entry : tensors_.buffers) rank.buffers += static_cast<int64_t>(entry.tensor.nbytes());
    }
    const bool whole_gradients = plan_.strategy == "ddp" || plan_.strategy == "zero1" || (cut() && !fsdp());
    for (size_t i = 0; i < gradients_.size(); ++i) {
      const auto bytes = parameters_[i].numel() * element_bytes(gradients_[i]);
      for (int rank = 0; rank < ranks_; ++rank) {
        auto& memory = plan_.ranks[rank];
        if (whole_gradients || (!cut() && owners_[i] == rank)) memory.gradients += bytes;
        const bool updates = plan_.strategy == "ddp" || owners_[i] == rank;
        if (!cut() && updates) memory.state += state_bytes(parameters_[i].sizes(), parameters_[i]);
        if (!owns_pieces() && !second_.empty() && second_[owners_[i]] == rank) {
          memory.second_owner_bytes += state_bytes(parameters_[i].sizes(), parameters_[i]);
        }
      }
    }
  }

  // State of a parameter, or of a piece of one, with these sizes.
  int64_t state_bytes(at::IntArrayRef sizes, const at::Tensor& parameter) {
    const auto group = param_groups_.at(parameter.unsafeGetTensorImpl());
    const bool copied = owns_pieces() && parameter.element_size() < static_cast<int64_t>(sizeof(float));
    if (!copied) return state_bytes_.of(sizes, parameter.scalar_type(), group);
    return state_bytes_.of(sizes, at::kFloat, group) +
           c10::multiply_integers(sizes) * static_cast<int64_t>(sizeof(float));
  }

  PlannedCalls wrapped_step(std::span<const size_t> order, std::shared_ptr<CommunicationHook> hook,
                            bool counts_second = false) {
    PlannedCalls calls;
    std::vector<at::Tensor> buffers;
    for (const auto& entry : tensors_.buffers) buffers.push_back(entry.tensor);
    for (const auto& chunk : coalesced(buffers)) {
      int64_t bytes = 0;
      for (const auto& tensor : chunk) bytes += static_cast<int64_t>(tensor.nbytes());
      calls.add(bytes);
    }
    std::unique_ptr<GradientReduction> reduction;
    if (plan_.strategy == "zero2") {
      const bool small = plan_.parameters_once && !hook;
      const auto options = zero2_options(parts_.values, parts_.options);
      const auto caps = sharded_bucket_caps(gradients_, options, ranks_, ranks_ == 1, small);
      reduction = std::make_unique<ReduceToOwner>(group_, caps, owners_);
    } else {
      reduction = std::make_unique<AllReduce>(group_, bucket_caps(ddp_options(parts_.values, parts_.options)));
    }
    const auto buckets = add_reductions(std::move(reduction), std::move(hook), order, calls);
    if (plan_.strategy != "ddp") add_publication(calls);
    for (const auto& members : buckets) {
      if (counts_second && plan_.strategy == "zero2") add_second_sums(members);
    }
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
    if (parts_.options.precision.scaler) {
      calls.add(3 * sizeof(double));  // whether some rank found inf or NaN, and whether scales are equal
    } else if (plan_.parameters_once && ranks_ > 1) {
      calls.add(0);  // a barrier
    }
  }

  PlannedCalls megatron_step(std::span<const size_t> order) {
    PlannedCalls calls;
    const auto caps = buffer_caps(gradients_, megatron_options(parts_.values, parts_.options));
    std::unique_ptr<GradientReduction> reduction;
    if (cut()) {
      reduction = std::make_unique<ReduceScatter>(group_, caps);
    } else {
      reduction = std::make_unique<ReduceToOwner>(group_, caps, owners_, /*follow=*/false);
    }
    const auto buckets = add_reductions(std::move(reduction), make_started_hook(compress()), order, calls);
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
      add_second_owners(members, layout);
    }
    add_second_owner_check();
    return calls;
  }

  PlannedCalls fsdp_step() {
    PlannedCalls calls;
    std::vector<int> units;
    const auto divided = divide(model_, tensors_, units_of(parts_));
    for (const auto& parameter : parameters_) {
      for (size_t unit = 0; unit < divided.size(); ++unit) {
        for (const auto& entry : divided[unit].parameters) {
          if (entry.tensor.is_same(parameter)) units.push_back(static_cast<int>(unit));
        }
      }
    }
    std::vector<int> places;
    for (int rank = 0; rank < ranks_ * plan_.hosts; ++rank) places.push_back(rank % ranks_);
    const ShardGroups groups{.all = replicas_ ? dry_run_group(ranks_ * plan_.hosts) : group_,
                             .shard = group_,
                             .replicas = replicas_,
                             .places = std::move(places),
                             .owners = ranks_};
    auto hook = make_started_hook(compress());
    const auto caps = unit_caps(plan_.parameters_once && !groups.replicated() && !hook);
    std::unique_ptr<GradientReduction> reduction;
    if (cut()) {
      reduction = scatter_units(groups, caps, units);
    } else {
      reduction = reduce_units_to_owners(groups, caps, units, owners_);
    }
    const auto buckets = add_reductions(std::move(reduction), std::move(hook), {}, calls);
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
      add_second_owners(members, layout);
    }
    add_second_owner_check();
    return calls;
  }

  // What a rank holds for another one of a bucket, and the messages of rank 0.
  void add_second_owners(const std::vector<size_t>& members, const FlatLayout& layout) {
    const auto sum_bytes = element_bytes(gradients_[members.front()]);
    for (int rank = 0; !second_.empty() && rank < ranks_; ++rank) {
      const auto range = cut() ? layout.part(rank) : Range{0, owners_[members.front()] == rank ? layout.size() : 0};
      if (range.empty()) continue;
      auto& memory = plan_.ranks[second_[rank]];
      memory.second_owner_bytes += range.size() * sum_bytes;
      for (const auto& slice : layout.overlapping(range)) {
        const auto& parameter = parameters_[members[slice.piece]];
        const auto sizes = cut() ? std::vector{slice.in_piece.size()} : parameter.sizes().vec();
        if (plan_.gathers)
          memory.second_owner_bytes += slice.in_piece.size() * parameter.element_size();  // else each rank has all
        memory.second_owner_bytes += state_bytes(sizes, parameter);
      }
      if (rank == 0) plan_.to_second_owners.add(range.size() * sum_bytes);
      if (second_[rank] == 0) plan_.to_second_owners.add(range.size() * sum_bytes);
    }
  }

  // The same of a bucket of one owner, whose optimizer's state is counted already.
  void add_second_sums(const std::vector<size_t>& members) {
    const int owner = owners_[members.front()];
    if (second_.empty()) return;
    const auto bytes = layout_of(members, /*scattered=*/false).size() * element_bytes(gradients_[members.front()]);
    plan_.ranks[second_[owner]].second_owner_bytes += bytes;
    if (owner == 0) plan_.to_second_owners.add(bytes);
    if (second_[owner] == 0) plan_.to_second_owners.add(bytes);
  }

  // Whether sums have changed since, and what both owners compare: those of whole parameters gradients, too.
  void add_second_owner_check() {
    const auto of_owners = (owns_pieces() ? 2 : 4) * second_.size();
    if (!second_.empty()) plan_.to_second_owners.add(static_cast<int64_t>((6 + of_owners) * sizeof(double)));
  }

  FlatLayout layout_of(const std::vector<size_t>& members, bool scattered) const {
    std::vector<int64_t> numels;
    for (const auto member : members) numels.push_back(parameters_[member].numel());
    const auto bytes = static_cast<size_t>(element_bytes(gradients_[members.front()]));
    return scattered ? scatter_layout(numels, bytes, ranks_) : FlatLayout(numels, bytes);
  }

  // Runs the reduction and the hook on each bucket in a dry-run group.
  Buckets add_reductions(std::unique_ptr<GradientReduction> plain, std::shared_ptr<CommunicationHook> hook,
                         std::span<const size_t> order, PlannedCalls& calls) {
    const torch::NoGradGuard no_grad;
    const auto reduction = with_hook(std::move(plain), std::move(hook), gradients_, "plan");
    const bool apart = reduction->plan().trailer_apart(gradients_);
    const auto before = group_.statistics();
    const auto between = replicas_ ? replicas_->statistics() : GroupStatistics();
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
    if (replicas_) {
      const auto sent = replicas_->statistics();
      plan_.between_hosts = {sent.calls - between.calls, sent.bytes - between.bytes};
      calls.calls += plan_.between_hosts.calls;
      calls.bytes += plan_.between_hosts.bytes;
    }
    if (apart)
      calls.add(StepTrailer::numel(gradients_.size()) *
                static_cast<int64_t>(c10::elementSize(ReductionPlan::trailer_dtype(gradients_))));
    return buckets;
  }

  static void add_broadcasts(const std::vector<Range>& ranges, int64_t element_bytes, PlannedCalls& calls) {
    for (const auto& range : ranges) {
      if (!range.empty()) calls.add(range.size() * element_bytes);
    }
  }

  const TrainingParts parts_;
  PlannedModule& planned_;
  const torch::nn::Module& model_;
  int ranks_;
  Group group_;
  std::optional<Group> replicas_{};  // ranks that hold the same shards
  ModuleTensors tensors_;
  std::vector<Gradient> gradients_;
  OptimizerRecipe::ParamGroups groups_;
  std::vector<int> second_;
  StateBytes state_bytes_;
  std::map<const c10::TensorImpl*, size_t> param_groups_;
  std::vector<at::Tensor> parameters_;
  std::vector<int> owners_;
  StrategyPlan plan_;
};

}  // namespace

StrategyPlan plan_strategy(const std::string& strategy, PlannedModule& planned, const OptimizerRecipe& recipe,
                           const TrainingOptions& training, int ranks, int hosts, bool one_host, bool elastic) {
  const auto names = plannable_strategies();
  if (std::find(names.begin(), names.end(), strategy) == names.end()) {
    throw UsageError(
        fmt::format("plan: strategy '{}' cannot be planned; choose from {}", strategy, fmt::join(names, ", ")));
  }
  if (ranks < 1) throw UsageError(fmt::format("plan: {} ranks; give at least 1", ranks));
  if (hosts < 1 || ranks % hosts != 0) {
    throw UsageError(fmt::format("plan: {} ranks on {} hosts; give a number of hosts that divides them", ranks, hosts));
  }
  if (!planned.module) throw UsageError("plan: there is no module");
  if (!recipe.make || !recipe.defaults)
    throw UsageError("plan: the recipe lacks `make` or `defaults`; take optimizer_recipe()");
  if (training.communication_hook) {
    throw UsageError(
        "plan: give the communication hook as the option compress; the object would be changed by planning");
  }
  const auto& chosen = find_strategy(strategy);
  auto values = option_values(chosen, training.options);
  const int copies = strategy == "hybrid" ? hosts : 1;
  one_host = one_host && hosts == 1;
  if (chosen.check)
    chosen.check(values, training, ranks, one_host || copies > 1 ? std::optional(copies) : std::nullopt);
  TrainingParts parts{.strategy = chosen,
                      .module = planned.module,
                      .recipe = recipe,
                      .group = dry_run_group(ranks / copies),
                      .options = training,
                      .values = std::move(values)};
  std::vector<int> second;
  const bool has_second = strategy != "ddp" && strategy != "hybrid";
  if (elastic && has_second && !one_host && ranks > 1) {
    std::vector<int> host_of;
    for (int rank = 0; rank < ranks; ++rank) host_of.push_back(rank / (ranks / hosts));
    second = choose_second_owners(host_of);
  }
  return Planner(std::move(parts), planned, copies, one_host, std::move(second)).make();
}

}  // namespace shoal
