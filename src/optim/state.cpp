#include "optim/state.h"

#include <c10/util/Type.h>
#include <fmt/format.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <deque>
#include <mutex>
#include <type_traits>
#include <typeinfo>

#include "shoal/error.h"
#include "shoal/optim.h"

namespace shoal {
namespace {

std::deque<detail::StateKind> built_in() {
  using namespace torch::optim;
  using detail::state_kind;
  const auto adam = [](auto& state, auto& field) {
    field("step", state.step());
    field("exp_avg", state.exp_avg());
    field("exp_avg_sq", state.exp_avg_sq());
    field.optional("max_exp_avg_sq", state.max_exp_avg_sq());
  };
  return {
      state_kind<Adam, AdamParamState>(adam),
      state_kind<AdamW, AdamWParamState>(adam),
      state_kind<SGD, SGDParamState>(
          [](auto& state, auto& field) { field("momentum_buffer", state.momentum_buffer()); }),
      state_kind<RMSprop, RMSpropParamState>([](auto& state, auto& field) {
        field("step", state.step());
        field("square_avg", state.square_avg());
        field.optional("momentum_buffer", state.momentum_buffer());
        field.optional("grad_avg", state.grad_avg());
      }),
      state_kind<Adagrad, AdagradParamState>([](auto& state, auto& field) {
        field("step", state.step());
        field("sum", state.sum());
      }),
      state_kind<Lamb, LambParamState>([](auto& state, auto& field) {
        field("step", state.step());
        field("exp_avg", state.exp_avg());
        field("exp_avg_sq", state.exp_avg_sq());
      }),
      state_kind<Adafactor, AdafactorParamState>([](auto& state, auto& field) {
        field("step", state.step());
        field.optional("row_var", state.row_var());
        field.optional("col_var", state.col_var());
        field.optional("variance", state.variance());
        field.optional("exp_avg", state.exp_avg());
      }),
      state_kind<AccumAdam, AccumAdamParamState>([](auto& state, auto& field) {
        field("step", state.step());
        field("exp_avg", state.exp_avg());
        field("exp_avg_sq", state.exp_avg_sq());
        field.optional("accum_grad", state.accum_grad());
        if constexpr (!std::is_const_v<std::remove_reference_t<decltype(state)>>) {  // Adam's state has none
          if (!state.accum_grad().defined()) state.accum_grad(at::zeros_like(state.exp_avg()));
        }
      }),
      state_kind<Muon, MuonParamState>(
          [](auto& state, auto& field) { field("momentum_buffer", state.momentum_buffer()); }),
  };
}

// Grows only at the front, so that references stay valid.
struct Registry {
  std::mutex mutex;
  std::deque<detail::StateKind> kinds = built_in();
};

Registry& registry() {
  static Registry instance;
  return instance;
}

template <class Matches>
const detail::StateKind& find_kind(const std::string& type, const Matches& matches) {
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  const auto found = std::find_if(all.kinds.begin(), all.kinds.end(), matches);
  if (found != all.kinds.end()) return *found;
  throw UsageError(
      fmt::format("the per-parameter state of {} is unknown; declare its fields with shoal::register_state "
                  "(shoal/optimizer_state.h)",
                  type));
}

}  // namespace

namespace detail {

void StateWriter::missing(const std::string& name) const {
  throw UsageError(fmt::format("the state for {} has no '{}'", optimizer_, name));
}

void StateWriter::finish() const {
  const auto refuse_unknown = [&](const auto& fields) {
    for (const auto& [name, value] : fields) {
      if (!used_.contains(name)) {
        throw UsageError(
            fmt::format("the state has '{}', which is not part of the state of {}; it was saved by another optimizer, "
                        "or with other options",
                        name, optimizer_));
      }
    }
  };
  refuse_unknown(named_.tensors);
  refuse_unknown(named_.numbers);
}

void add_state_kind(StateKind kind) {
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  all.kinds.push_front(std::move(kind));
}

}  // namespace detail

bool is_state_known(const torch::optim::Optimizer& of) {
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  return std::any_of(all.kinds.begin(), all.kinds.end(),
                     [&](const detail::StateKind& candidate) { return candidate.is_kept_by(of); });
}

NamedState named_state(const torch::optim::OptimizerParamState& state) {
  return find_kind(c10::demangle(typeid(state).name()),
                   [&](const detail::StateKind& candidate) { return candidate.matches(state); })
      .read(state);
}

std::vector<at::Tensor> state_tensors(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> all;
  for (const auto& [parameter, state] : optimizer.state()) {
    for (const auto& [name, tensor] : named_state(*state).tensors) all.push_back(tensor);
  }
  return all;
}

std::unique_ptr<torch::optim::OptimizerParamState> make_state(const torch::optim::Optimizer& of, size_t param_group,
                                                              const NamedState& named) {
  if (dynamic_cast<const MuonWithAdamW*>(&of) != nullptr) {
    const std::vector<at::Tensor> any{at::empty({1, 1})};
    return param_group == 0 ? make_state(Muon(any), 0, named) : make_state(FusedAdamW(any), 0, named);
  }
  const auto type = c10::demangle(typeid(of).name());
  const auto& kind = find_kind(type, [&](const detail::StateKind& candidate) { return candidate.is_kept_by(of); });
  return kind.make(named, type);
}

size_t param_group_of(const torch::optim::Optimizer& of, const void* parameter) {
  const auto& groups = of.param_groups();
  if (groups.size() == 1) return 0;
  for (size_t number = 0; number < groups.size(); ++number) {
    for (const auto& one : groups[number].params()) {
      if (one.unsafeGetTensorImpl() == parameter) return number;
    }
  }
  return groups.size();
}

void complete_states(torch::optim::Optimizer& of) {
  if (dynamic_cast<const torch::optim::RMSprop*>(&of) == nullptr) return;
  for (const auto& group : of.param_groups()) {
    const auto& options = static_cast<const torch::optim::RMSpropOptions&>(group.options());
    for (const auto& parameter : group.params()) {
      const auto found = of.state().find(parameter.unsafeGetTensorImpl());
      if (found == of.state().end()) continue;
      auto& state = static_cast<torch::optim::RMSpropParamState&>(*found->second);
      const auto zeros = [&] { return at::zeros_like(state.square_avg()); };
      if (options.momentum() > 0 && !state.momentum_buffer().defined()) state.momentum_buffer(zeros());
      if (options.centered() && !state.grad_avg().defined()) state.grad_avg(zeros());
    }
  }
}

void reset_state(torch::optim::Optimizer& of, void* parameter) {
  of.state().erase(parameter);
  if (dynamic_cast<const torch::optim::Adagrad*>(&of) == nullptr) return;
  for (const auto& group : of.param_groups()) {
    for (const auto& one : group.params()) {
      if (one.unsafeGetTensorImpl() != parameter) continue;
      const auto& options = static_cast<const torch::optim::AdagradOptions&>(group.options());
      auto state = std::make_unique<torch::optim::AdagradParamState>();
      state->step(0);
      state->sum(at::full_like(one.detach(), options.initial_accumulator_value()));
      of.state()[parameter] = std::move(state);
      return;
    }
  }
}

}  // namespace shoal
