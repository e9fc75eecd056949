#include "engine/elastic/guarded_update.h"

#include <c10/util/Type.h>
#include <fmt/format.h>
#include <torch/utils.h>

#include <chrono>
#include <typeinfo>
#include <utility>

#include "memory/views.h"
#include "shoal/error.h"

namespace shoal {
namespace {

bool lies_as(const at::Tensor& gradient, const at::Tensor& values) {
  return gradient.scalar_type() == values.scalar_type() && gradient.sizes() == values.sizes() &&
         gradient.strides() == at::IntArrayRef(dense_strides(values));
}

}  // namespace

GuardedUpdate::GuardedUpdate(const Group& group, UpdateTargets targets, torch::optim::Optimizer& local,
                             bool element_wise)
    : group_(group),
      survivors_(group),
      local_(local),
      element_wise_(element_wise),
      shared_(group, std::move(targets), element_wise ? chunk_numel : INT64_MAX) {
  const auto& of = local_;
  if (!is_state_known(of)) {
    throw UsageError(
        fmt::format("Elastic: the state of {} is unknown; declare its fields with shoal::register_state "
                    "(shoal/optimizer_state.h)",
                    c10::demangle(typeid(of).name())));
  }
  const auto& own = shared_.targets()[static_cast<size_t>(group_.rank())];
  gradients_.resize(own.size());
  copies_.resize(own.size());
  others_.resize(own.size());
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < own.size(); ++i) {
    const auto found = local_.state().find(own[i].values.unsafeGetTensorImpl());
    if (found == local_.state().end()) continue;
    shared_.keep(group_.rank(), i, named_state(*found->second));
    take_state(i);
  }
}

void GuardedUpdate::take_state(size_t target) {
  const auto state = shared_.state(group_.rank(), target);
  if (!state) return;
  const auto& own = shared_.targets()[static_cast<size_t>(group_.rank())][target];
  local_.state()[own.values.unsafeGetTensorImpl()] = make_state(local_, own.param_group, *state);
}

void GuardedUpdate::adopt(const HeldState& former) {
  const torch::NoGradGuard no_grad;
  const auto& own = shared_.targets()[static_cast<size_t>(group_.rank())];
  for (size_t i = 0; i < own.size(); ++i) {
    const auto state = former.state_of(own[i]);
    if (!state) continue;
    shared_.keep(group_.rank(), i, *state);
    take_state(i);
  }
}

void GuardedUpdate::release(const HeldState& former, const std::vector<UpdateTarget>& own,
                            torch::optim::Optimizer& local) {
  const torch::NoGradGuard no_grad;
  for (const auto& target : own) {
    auto state = former.state_of(target);
    if (!state) continue;
    for (auto& [name, tensor] : state->tensors) tensor = tensor.clone();
    local.state()[target.values.unsafeGetTensorImpl()] = make_state(local, target.param_group, *state);
  }
}

bool GuardedUpdate::prepare(const GossipTerms& mixed_in) {
  const int self = group_.rank();
  const auto& own = shared_.targets()[static_cast<size_t>(self)];
  for (size_t i = 0; i < own.size(); ++i) {
    require_own_state(i);
    const auto& values = own[i].values;
    auto gradient = values.grad();
    const auto given = gradient;
    auto& shown = shared_.inputs(self, i);
    const auto mixed = mixed_in.find(values.unsafeGetTensorImpl());
    shown.has_others = mixed != mixed_in.end() && values.numel() > 0;
    others_[i] = shown.has_others ? mixed->second.others : at::Tensor();
    if (shown.has_others) {
      shown.others = survivors_.place_of(others_[i].data_ptr(), others_[i].nbytes()).value();
      shown.own = mixed->second.own;
    }
    shown.has_gradient = gradient.defined();
    gradients_[i] = Gradient();
    if (!shown.has_gradient) continue;
    if (gradient.layout() != at::kStrided) throw UsageError("Elastic: sparse gradients are not supported here");
    auto place = lies_as(gradient, values) ? survivors_.place_of(gradient.data_ptr(), gradient.nbytes()) : std::nullopt;
    if (!place) {
      if (!copies_[i].defined()) copies_[i] = group_.allocate(values.numel(), values.options().requires_grad(false));
      const torch::NoGradGuard no_grad;
      gradient = view_like(copies_[i], 0, values).copy_(gradient);
      place = survivors_.place_of(gradient.data_ptr(), gradient.nbytes());
    }
    gradients_[i] = {gradient.detach(), SeenGradient(given)};
    shown.gradient = *place;
  }
  const auto before = std::exchange(arenas_, survivors_.arenas());
  return before != arenas_;
}

// One word in shared memory has the verdict, so that all ranks have the same one, also where one of them waits no
// longer for a rank that comes late after all.
void GuardedUpdate::commit() {
  const auto number = ++commits_;
  shared_.record(group_.rank()).reached.store(number);
  survivors_.ring();
  const auto& verdict = shared_.record(0).verdict;
  const auto failed = 2 * number;
  int missing = -1;
  const auto decided = [&] {
    bool all = true;
    for (int rank = 0; rank < group_.size() && missing < 0; ++rank) {
      const bool absent = survivors_.absent(rank);  // asked first: a rank that is absent and has not come never comes
      if (shared_.record(rank).reached.load() >= number) continue;
      all = false;
      if (absent) missing = rank;
    }
    if (verdict.load() < failed && (all || missing >= 0)) give_verdict(number, all);
    return verdict.load() >= failed;
  };
  if (!survivors_.wait_in_time("the commit of a step", decided)) give_verdict(number, false);
  if (verdict.load() > failed) return;
  if (missing >= 0) throw CommError(fmt::format("rank {} has ended before the commit of the step", missing), missing);
  throw CommError("a rank has not come to the commit of the step in time");
}

void GuardedUpdate::give_verdict(int64_t number, bool passes) const {
  auto& verdict = shared_.record(0).verdict;
  const auto failed = 2 * number;
  auto before = verdict.load();
  while (before < failed && !verdict.compare_exchange_weak(before, failed + (passes ? 1 : 0))) {
  }
  survivors_.ring();
}

// One rank of the host asks for all that wait here. Whoever asks gets the same answer, so it does no harm if several
// do, as when the first one does not get one in time.
bool GuardedUpdate::commit_over_hosts(bool came, const DecideOverHosts& decide) {
  const auto number = ++commits_;
  const auto& verdict = shared_.record(0).verdict;
  const auto failed = 2 * number;
  const auto patience = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  const auto asks = [&] {
    return !came || survivors_.acting_rank() == group_.rank() || std::chrono::steady_clock::now() > patience;
  };
  survivors_.wait_in_time("the commit of a step", [&] { return verdict.load() >= failed || asks(); });
  if (verdict.load() < failed) give_verdict(number, decide(came));
  return verdict.load() > failed;
}

void GuardedUpdate::seal() {
  commit();
  shared_.record(group_.rank()).updated.store(commits_);
}

void GuardedUpdate::require_own_state(size_t target) const {
  const int self = group_.rank();
  const auto kept = shared_.state(self, target);
  const auto found =
      local_.state().find(shared_.targets()[static_cast<size_t>(self)][target].values.unsafeGetTensorImpl());
  bool same = kept.has_value() == (found != local_.state().end());
  if (same && kept) {
    const auto present = named_state(*found->second);
    same = kept->numbers == present.numbers && kept->tensors.size() == present.tensors.size();
    for (const auto& [name, tensor] : present.tensors) {
      const auto place = kept->tensors.find(name);
      same = same && place != kept->tensors.end() && place->second.const_data_ptr() == tensor.const_data_ptr();
    }
  }
  if (same) return;
  throw UsageError(
      "Elastic: the state of the sharded optimizer was loaded or replaced, which is not supported here: load it before "
      "Elastic is constructed");
}

void GuardedUpdate::require_commit() const {
  if (commits_ == 0 || is_updated(group_.rank())) refuse_without_commit();
}

void GuardedUpdate::refuse_without_commit() {
  throw UsageError(
      "Elastic: step() of the sharded optimizer is for the second function of Elastic::step(), once in each step");
}

// Another rank would finish the update with the gradients of the commit, or with some that are half changed.
void GuardedUpdate::require_committed_gradients() const {
  const auto& own = shared_.targets()[static_cast<size_t>(group_.rank())];
  for (size_t i = 0; i < own.size(); ++i) {
    if (!gradients_[i].seen.is(own[i].values.grad())) throw UsageError(late_change);
  }
}

void GuardedUpdate::run(bool updates) {
  require_commit();
  updates_ = updates;
  const torch::NoGradGuard no_grad;
  const int self = group_.rank();
  update(self);
  const auto every = [&](const auto& holds) {
    for (int rank = 0; rank < group_.size(); ++rank) {
      if (!holds(rank)) return false;
    }
    return true;
  };
  while (!every([&](int rank) { return is_updated(rank); })) {
    for (int rank = 0; rank < group_.size(); ++rank) {
      if (is_lost(rank) && survivors_.acting_rank() == self) update(rank);
    }
    survivors_.wait(
        "the update of a step",
        [&] {
          const bool rank_to_finish =
              survivors_.acting_rank() == self && !every([&](int rank) { return !is_lost(rank); });
          return rank_to_finish || every([&](int rank) { return is_updated(rank); });
        },
        [&](int rank) { return !is_updated(rank); });
  }
  for (auto& gradient : gradients_) gradient = Gradient();
}

bool GuardedUpdate::is_abandoned_by_all() {
  const int self = group_.rank();
  const auto has_begun = [&](int rank) {
    const auto& record = shared_.record(rank);
    return record.update.load() >= commits_ || record.updated.load() >= commits_;
  };
  if (has_begun(self)) return false;
  shared_.record(self).abandoned.store(commits_);
  survivors_.ring();
  bool begun = false;
  const auto owes = [&](int rank) { return !has_begun(rank) && shared_.record(rank).abandoned.load() < commits_; };
  const auto all_have_come = [&] {
    bool all = true;
    for (int rank = 0; rank < group_.size(); ++rank) {
      const bool absent = survivors_.absent(rank);  // asked first: what it has written counts
      begun = begun || has_begun(rank);
      all = all && (absent || !owes(rank));
    }
    return begun || all;
  };
  const auto late = [&](int rank) { return owes(rank) && !survivors_.absent(rank); };
  survivors_.wait("the end of a step that this rank does not update", all_have_come, late);
  return !begun;
}

void GuardedUpdate::skip() {
  require_commit();
  shared_.record(group_.rank()).updated.store(commits_);
  survivors_.ring();
}

}  // namespace shoal
