#include "shoal/zero.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "engine/changes/changed_values.h"
#include "engine/changes/operator_watch.h"
#include "engine/changes/separate_memory.h"
#include "engine/gradients/forward_turns.h"
#include "engine/gradients/local_gradients.h"
#include "engine/sharded/changed_options.h"
#include "module/walk.h"
#include "shoal/error.h"
#include "strategy/zero/oss_state.h"

namespace shoal {

std::string OSSCore::State::describe(const at::Tensor& parameter) const {
  return fmt::format("{} [{}]", shares.indices[shares.place_of(parameter)], fmt::join(parameter.sizes(), ", "));
}

OSSCore::State::~State() {
  if (wrapper) wrapper->optimizer_ended = true;
}

void OSSCore::State::require_wrapper() const {
  if (std::any_of(shares.parameters.begin(), shares.parameters.end(), ForwardTurns::are_apart)) {
    throw UsageError(
        "OSS updates each parameter on one rank for all, and the model's DistributedDataParallel has a "
        "PostLocalSgdHook "
        "(in Python a post_local_sgd_hook), by which groups of ranks train their own: use an optimizer of torch.optim, "
        "or all ranks as the hook's `local`");
  }
  if (!wrapper || wrapper->steps || wrapper->reduced > wrapper->updated) return;
  const auto reduced = [](const at::Tensor& parameter) { return ForwardTurns::are_taken(parameter, /*open=*/false); };
  if (std::any_of(shares.parameters.begin(), shares.parameters.end(), reduced)) return;  // by another wrapper
  throw UsageError(
      "OSS: the ShardedDataParallel that reduced its gradients is gone, so that each rank has its own: keep "
      "the wrapper as long as the optimizer (model = ShardedDataParallel(...))");
}

// A parameter in no wrapped module, such as a learned temperature in the loss, has this rank's own gradient, unless the
// program averages it. Where no parameter is in one, the program, or another library's wrapper, averages all of them.
void OSSCore::State::agree_on_gradients() const {
  const auto& all = everybody ? *everybody : group;
  if (all.size() == 1) return;
  std::vector<std::string> gradients;
  bool some_wrapped = false;
  for (const auto& parameter : shares.parameters) {
    if (ForwardTurns::are_taken(parameter, /*open=*/false)) {
      some_wrapped = true;
    } else if (parameter.requires_grad()) {
      const auto& gradient = parameter.grad();
      gradients.push_back(
          fmt::format("the gradient of parameter {}, digest {:016x}", describe(parameter),
                      gradient.defined() ? digest_of(gradient.is_sparse() ? gradient.to_dense() : gradient) : 0));
    }
  }
  if (!some_wrapped || gradients.empty()) return;
  agree_as("agreement on gradients of parameters of OSS that are in no wrapped module", all,
           "gradients that no wrapper averages, of parameters outside of the wrapped modules (make each a part of the "
           "module, or average its gradient over the ranks)",
           gradients);
}

std::vector<at::Tensor> OSSCore::State::take_gradients() {
  if (group.size() > 1) require_wrapper();
  for (const auto& parameter : shares.parameters) require_no_local_gradient(parameter, name, describe(parameter));
  finite.reset();
  // Where other ranks hold the mean, too, it stays equal: a later backward may add to it.
  auto gradients = counted_gradients();
  for (size_t i = 0; i < shares.parameters.size(); ++i) {
    const auto& gradient = shares.parameters[i].grad();
    const bool elsewhere = shares.owners[i] != group.rank() && gradient.defined();
    if (elsewhere && !is_watchable(gradient)) gradients.push_back(gradient);  // a stand-in has no memory
  }
  if (second_shards.gradients) {
    for_owned([&](size_t place, int owner) {
      if (!has_stand_in(place, owner)) return;
      if (const auto copy = gradient_of(place, owner); copy.defined()) gradients.push_back(copy);
    });
  }
  return gradients;
}

std::vector<at::Tensor> OSSCore::State::counted_gradients() const {
  std::vector<at::Tensor> gradients;
  for (size_t i = 0; i < shares.parameters.size(); ++i) {
    const auto& gradient = shares.parameters[i].grad();
    if (shares.owners[i] == group.rank() && gradient.defined()) gradients.push_back(gradient);
  }
  return gradients;
}

bool OSSCore::State::shared() const {
  return std::any_of(buffers.begin(), buffers.end(), [](const auto& buffer) { return buffer->shared(); });
}

std::string OSSCore::State::advice_on_groups() const {
  return "through torch::optim::Optimizer&, which the other ranks do not see; undo it (param_groups().pop_back()) and "
         "call OSS's own add_param_group() on every rank";
}

std::string OSSCore::State::advice_on_adding(const std::vector<at::Tensor>&) const {
  return "add_parameters would change the param groups of this rank alone; call add_param_group()";
}

std::vector<StatePiece> OSSCore::State::pieces(const torch::nn::Module& module) const {
  std::vector<StatePiece> list;
  for (const auto& entry : walk(module, {}).parameters) {
    const auto owner = shares.owner_of(entry.tensor);
    if (!owner) continue;
    list.push_back({.name = entry.name,
                    .parameter = entry.tensor,
                    .range = {0, entry.tensor.numel()},
                    .owner = *owner,
                    .updated = owner == group.rank() ? entry.tensor : at::Tensor()});
  }
  return list;
}

bool OSSCore::State::must_share_again(const ParamGroups& groups) const {
  for (const auto& buffer : buffers) {
    for (size_t i = 0; i < buffer->parameters().size(); ++i) {
      if (!buffer->watch().other_kind(i)) continue;
      if (!buffer->watch().other_shape(i)) return true;
      throw UsageError(
          fmt::format("OSS: the shape of parameter {} has changed: {}; construct the optimizer again after changing it",
                      shares.indices[shares.place_of(buffer->parameters()[i])], buffer->watch().describe(i)));
    }
  }
  return lacks_trainable(groups);
}

void OSSCore::State::separate_replaced() const {
  std::vector<at::Tensor> replaced;
  for (const auto& buffer : buffers) {
    for (size_t i = 0; i < buffer->parameters().size(); ++i) {
      if (buffer->watch().replaced(i)) replaced.push_back(buffer->parameters()[i]);
    }
  }
  if (!replaced.empty()) separate(shares.named(), replaced, "OSS");
}

void OSSCore::State::adopt_values() {
  separate_replaced();
  std::vector<ChangedValue> values;
  for (const auto& buffer : buffers) {
    buffer->forget_undone();
    for (const auto piece : buffer->changed()) {
      const auto& parameter = buffer->parameters()[piece];
      values.push_back({describe(parameter) + " of OSS", digest_of(parameter)});
    }
  }
  if (!values.empty()) {
    for (const auto& buffer : buffers) buffer->leave_to_holders();
    agree_on_values(group, values);
    second_shards.written = has_second_owners();
    for (const auto& buffer : buffers) {
      if (!buffer->changed().empty()) buffer->adopt(label("replaced parameters"));
    }
  }
  if (!has_commit()) return;
  for (const auto& buffer : buffers) buffer->leave_moved();  // other ranks may have to finish the update
}

OSSCore::OSSCore(const ParamGroups& groups, std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                 OptimizerFactory make, bool element_wise, const Group& group, const OSSOptions& options)
    : ShardedOptimizerBase(groups, std::move(defaults), std::move(make), [&] {
        options.validate();
        agree(group, "the options of OSS",
              {fmt::format("broadcast_buffer_size {}", options.broadcast_buffer_size),
               fmt::format("broadcast_fp16 {}", options.broadcast_fp16)});
        auto state = std::make_unique<State>("OSS", group);
        state->options = options;
        state->element_wise = element_wise;
        return state;
      }()) {}

OSSCore::State& OSSCore::state() const {
  return static_cast<State&>(ShardedOptimizerBase::state());
}

bool OSSCore::step(GradScaler& scaler, double max_norm) {
  return step_with(&scaler, max_norm).updated;
}

double OSSCore::clip_grad_norm(double max_norm, double norm_type) {
  state().require_known(*this);
  adopt_changes();
  state().agree_on_gradients();
  return state().clip(state().take_gradients(), max_norm, norm_type);
}

void OSSCore::refresh_trainable() {
  state().require_known(*this);
  state().may_move = true;
  share(param_groups_, param_groups_.size());
}

void OSSCore::add_param_group(const torch::optim::OptimizerParamGroup& group) {
  state().require_known(*this);
  auto groups = param_groups_;
  groups.push_back(group);
  if (!group.has_options()) groups.back().set_options(defaults_->clone());
  state().may_move = true;
  share(std::move(groups), param_groups_.size());
}

OptimizerState OSSCore::state_dict(detail::ModuleRef module, std::optional<int> recipient) const {
  state().require_known(*this);
  return state().gather(state().pieces(module), recipient);
}

void OSSCore::load_state_dict(detail::ModuleRef module, const OptimizerState& state) {
  this->state().require_known(*this);
  this->state().load(this->state().pieces(module), state);
  this->state().agreement.loaded = digest_of(state);
}

std::vector<std::vector<at::Tensor>> OSSCore::partition() const {
  const auto& shares = state().shares;
  std::vector<std::vector<at::Tensor>> parts(group().size());
  for (size_t i = 0; i < shares.parameters.size(); ++i) {
    const auto& parameter = shares.parameters[i];
    if (parameter.requires_grad()) parts[shares.owners[i]].push_back(parameter);
  }
  return parts;
}

int OSSCore::param_to_rank(const at::Tensor& parameter) const {
  return state().shares.owners[state().shares.place_of(parameter)];
}

size_t OSSCore::param_to_index(const at::Tensor& parameter) const {
  return state().shares.indices[state().shares.place_of(parameter)];
}

std::vector<at::Tensor> OSSCore::local_params() const {
  return partition()[group().rank()];
}

ShareSizes OSSCore::share_sizes() const {
  const auto& shares = state().shares;
  ShareSizes sizes{.trainable = std::vector<int64_t>(group().size()), .frozen = std::vector<int64_t>(group().size())};
  for (size_t i = 0; i < shares.parameters.size(); ++i) {
    const auto& parameter = shares.parameters[i];
    (parameter.requires_grad() ? sizes.trainable : sizes.frozen)[shares.owners[i]] += parameter.numel();
    if (parameter.requires_grad()) sizes.largest = std::max(sizes.largest, parameter.numel());
  }
  return sizes;
}

}  // namespace shoal
