#include "shoal/strategy/megatron/distributed_optimizer.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <unordered_map>

#include "engine/gradient_norm.h"
#include "module/walk.h"
#include "optim/param_groups.h"
#include "shoal/base/error.h"
#include "shoal/comm/agree.h"
#include "strategy/megatron/chunk.h"

namespace shoal {

using torch::optim::OptimizerParamGroup;

void DistributedOptimizerOptions::validate() const {
  std::vector<std::string> faults;
  if (bucket_size < 1) faults.push_back(fmt::format("bucket_size {}: give at least 1 element", bucket_size));
  if (!(clip_grad >= 0) || std::isinf(clip_grad)) {
    faults.push_back(fmt::format("clip_grad {}: give a norm, or 0 for no clipping", clip_grad));
  }
  if (!faults.empty()) throw UsageError(fmt::format("DistributedOptimizer: {}", fmt::join(faults, "; ")));
  if (scaler) scaler->validate();
}

struct DistributedOptimizerCore::State {
  Group group;
  DistributedOptimizerOptions options;
  std::vector<std::unique_ptr<Chunk>> chunks{};
  std::unique_ptr<torch::optim::Optimizer> local{};  // its param groups match the whole optimizer's
  std::optional<GradScaler> scaler{};
  struct Extra {
    std::vector<at::Tensor> parameters;
    Group group;
  };
  std::vector<Extra> extra_reductions{};
  int no_sync_depth = 0;
  bool reduced = true;  // without overlap: nothing has accumulated since the last reduction
  int64_t steps = 0;

  Label label(const char* what) const { return {steps, -1, what}; }
  template <class Visit>
  void for_pieces(const Visit& visit) {
    for (auto& chunk : chunks) {
      for (auto& piece : chunk->pieces()) visit(*chunk, piece);
    }
  }
  bool anywhere(bool here, const char* what) const;
  std::vector<at::Tensor> gradients();
  std::vector<StatePiece> state_pieces() const;
};

namespace {

// Without param groups: one of all trainable parameters.
std::vector<OptimizerParamGroup> complete(const DistributedOptimizerCore::Modules& chunks,
                                          std::vector<OptimizerParamGroup> groups,
                                          const DistributedOptimizerOptions& options) {
  options.validate();
  if (chunks.empty()) throw UsageError("DistributedOptimizer: give at least one module");
  if (!groups.empty()) return groups;
  std::vector<at::Tensor> parameters;
  for (const auto& module : chunks) {
    if (!module) throw UsageError("DistributedOptimizer: a module is empty");
    for (const auto& entry : walk(*module, options.ignored).trainable()) parameters.push_back(entry.tensor);
  }
  groups.emplace_back(std::move(parameters));
  return groups;
}

}  // namespace

bool DistributedOptimizerCore::State::anywhere(bool here, const char* what) const {
  auto flag = at::full({1}, here ? 1 : 0, at::kInt);
  group.all_reduce(flag, ReduceOp::max, label(what)).wait();
  return flag.item<int>() != 0;
}

std::vector<StatePiece> DistributedOptimizerCore::State::state_pieces() const {
  std::vector<StatePiece> all;
  for (size_t number = 0; number < chunks.size(); ++number) {
    for (auto& piece : chunks[number]->state_pieces(chunks.size() > 1 ? fmt::format("chunk{}.", number) : "")) {
      all.push_back(std::move(piece));
    }
  }
  return all;
}

// What the optimizer will see, in float32 and over; sets grad() of the main pieces.
std::vector<at::Tensor> DistributedOptimizerCore::State::gradients() {
  std::vector<at::Tensor> list;
  for_pieces([&](Chunk& chunk, OwnedPiece& piece) {
    auto& grad = piece.main.mutable_grad();
    if (!chunk.reducer().used(piece.gradient)) {
      grad.reset();
      return;
    }
    grad = piece.sum.to(piece.main.scalar_type());
    list.push_back(grad);
  });
  return list;
}

DistributedOptimizerCore::DistributedOptimizerCore(const Modules& chunks, ParamGroups groups,
                                                   std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                                                   Factory make, bool cut, const Group& group,
                                                   const DistributedOptimizerOptions& options)
    : torch::optim::Optimizer(complete(chunks, std::move(groups), options), std::move(defaults)),
      state_(std::make_unique<State>(State{.group = group, .options = options})) {
  auto& state = *state_;
  agree(group, "the parameters and options of DistributedOptimizer", describe(param_groups_));
  for (const auto& module : chunks) {
    state.chunks.push_back(std::make_unique<Chunk>(module, group, options, cut));
    state.chunks.back()->reducer().synchronises = [raw = &state] {
      const bool now = raw->options.overlap_grad_reduce && raw->no_sync_depth == 0;
      if (!now) raw->reduced = false;
      return now;
    };
  }
  std::unordered_map<const c10::TensorImpl*, size_t> param_group;
  for (size_t number = 0; number < param_groups_.size(); ++number) {
    for (const auto& parameter : param_groups_[number].params()) {
      const auto [place, fresh] = param_group.emplace(parameter.unsafeGetTensorImpl(), number);
      if (fresh || place->second == number) continue;
      throw UsageError(fmt::format("DistributedOptimizer: a parameter [{}] is in two param groups; leave it in one",
                                   fmt::join(parameter.sizes(), ", ")));
    }
  }
  auto share = empty_like(param_groups_);
  state.for_pieces([&](Chunk& chunk, OwnedPiece& piece) {
    const auto& gradient = chunk.reducer().gradients()[piece.gradient];
    const auto place = param_group.find(gradient.parameter.unsafeGetTensorImpl());
    if (place == param_group.end()) {
      throw UsageError(fmt::format(
          "DistributedOptimizer: parameter {} belongs to no param group; add it to one, freeze it or ignore it",
          gradient.name));
    }
    share[place->second].params().push_back(piece.main);
  });
  state.local = make(share);
  if (options.scaler) state.scaler.emplace(*options.scaler);
}

DistributedOptimizerCore::~DistributedOptimizerCore() = default;

at::Tensor DistributedOptimizerCore::scale_loss(const at::Tensor& loss) const {
  return state_->scaler ? state_->scaler->scale(loss) : loss;
}

void DistributedOptimizerCore::backward(const at::Tensor& loss_sum, double weight) {
  if (state_->chunks.size() > 1) {
    throw UsageError("DistributedOptimizer: a backward with a weight is for one chunk; weight the loss instead");
  }
  state_->chunks.front()->reducer().backward(loss_sum, weight);
}

NoSync DistributedOptimizerCore::no_sync(bool accumulate) {
  return NoSync(accumulate ? &state_->no_sync_depth : nullptr);
}

void DistributedOptimizerCore::all_reduce_grads(const std::vector<at::Tensor>& parameters, const Group& group) {
  if (state_->options.overlap_grad_reduce) {
    throw UsageError(
        "DistributedOptimizer: all_reduce_grads comes before the reduction; set overlap_grad_reduce = false");
  }
  state_->extra_reductions.push_back({parameters, group});
}

void DistributedOptimizerCore::reduce_model_grads() {
  auto& state = *state_;
  if (state.options.overlap_grad_reduce) {
    throw UsageError("DistributedOptimizer: backward has reduced the gradients already (overlap_grad_reduce)");
  }
  const torch::NoGradGuard no_grad;
  for (const auto& extra : state.extra_reductions) {
    for (const auto& parameter : extra.parameters) {
      const auto grad = main_grad(parameter);
      // Channels-last gradients are not contiguous, but dense; ranks agree on the layout.
      extra.group.all_reduce(grad.as_strided({grad.numel()}, {1}), ReduceOp::sum, state.label("declared gradients"))
          .wait();
    }
  }
  for (auto& chunk : state.chunks) {
    auto& reducer = chunk->reducer();
    const auto usual = std::exchange(reducer.synchronises, [] { return true; });
    reducer.reduce_now();
    reducer.synchronises = usual;
  }
  state.reduced = true;
}

DistributedStep DistributedOptimizerCore::step() {
  auto& state = *state_;
  if (!state.options.overlap_grad_reduce && !state.reduced) reduce_model_grads();
  const torch::NoGradGuard no_grad;
  DistributedStep result;
  const auto gradients = state.gradients();
  if (state.scaler) {
    const bool found = state.anywhere(state.scaler->unscale(gradients), "inf or NaN in gradients");
    state.scaler->update(found);
    result.updated = !found;
  }
  if (result.updated) {
    if (state.options.clip_grad > 0) {
      result.grad_norm = global_norm(gradients, 2, state.group, state.label("norm of the gradients"));
      clip_to_norm(gradients, *result.grad_norm, state.options.clip_grad);
    }
    if (state.options.log_num_zeros_in_grad) {
      auto zeros = at::zeros({1}, at::kLong);
      for (const auto& gradient : gradients) zeros += gradient.numel() - gradient.count_nonzero();
      state.group.all_reduce(zeros, ReduceOp::sum, state.label("zeros in gradients")).wait();
      result.num_zeros = zeros.item<int64_t>();
    }
    copy_options(param_groups_, *state.local);
    state.local->step();
    state.for_pieces([](Chunk&, OwnedPiece& piece) {
      if (piece.copied())
        piece.model.copy_(piece.whole ? piece.main.as_strided({piece.main.numel()}, {1}) : piece.main);
    });
    for (auto& chunk : state.chunks) chunk->publish(state.label("updated parameters"));
    for (auto& chunk : state.chunks) {
      chunk->wait(state.label("updated parameters"), state.options.overlap_param_gather);
    }
  }
  state.for_pieces([](Chunk&, OwnedPiece& piece) { piece.main.mutable_grad().reset(); });
  ++state.steps;
  return result;
}

at::Tensor DistributedOptimizerCore::step(LossClosure closure) {
  at::Tensor loss;
  if (closure != nullptr) {
    const at::AutoGradMode grad(true);
    loss = closure();
  }
  step();
  return loss;
}

void DistributedOptimizerCore::zero_grad(bool set_to_none) {
  torch::optim::Optimizer::zero_grad(set_to_none);
  for (auto& chunk : state_->chunks) chunk->reducer().drop_sums();
}

void DistributedOptimizerCore::abandon_step() {
  for (auto& chunk : state_->chunks) {
    chunk->reducer().expect_backward();
    chunk->reducer().mark_failed();
    chunk->reducer().abandon();
  }
}

at::Tensor DistributedOptimizerCore::main_grad(const at::Tensor& parameter) const {
  for (const auto& chunk : state_->chunks) {
    if (const auto grad = chunk->main_grad(parameter)) return *grad;
  }
  throw UsageError("DistributedOptimizer: main_grad of a tensor that is none of its trainable parameters");
}

std::vector<ParameterRange> DistributedOptimizerCore::param_range_map(std::optional<int> rank) const {
  std::vector<ParameterRange> all;
  for (size_t number = 0; number < state_->chunks.size(); ++number) {
    for (auto& range : state_->chunks[number]->ranges(rank.value_or(state_->group.rank()))) {
      range.chunk = number;
      all.push_back(std::move(range));
    }
  }
  return all;
}

OptimizerState DistributedOptimizerCore::state_dict(std::optional<int> recipient) const {
  return gather_state(state_->group, state_->state_pieces(), *state_->local, recipient);
}

void DistributedOptimizerCore::load_state_dict(const OptimizerState& state) {
  load_state(state_->group.rank(), state_->state_pieces(), *state_->local, state);
}

const GradScaler* DistributedOptimizerCore::scaler() const {
  return state_->scaler ? &*state_->scaler : nullptr;
}

const Group& DistributedOptimizerCore::group() const {
  return state_->group;
}

const torch::optim::Optimizer& DistributedOptimizerCore::local_optimizer() const {
  return *state_->local;
}

}  // namespace shoal
