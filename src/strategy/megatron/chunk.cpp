#include "strategy/megatron/chunk.h"

#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>

#include "engine/data_parallel_state.h"
#include "engine/ownership.h"
#include "module/sync.h"
#include "module/walk.h"
#include "shoal/base/error.h"
#include "strategy/megatron/bucket_caps.h"

namespace shoal {
namespace {

void check_dtype(const Gradient& gradient, const DistributedOptimizerOptions& options) {
  const auto dtype = gradient.parameter.scalar_type();
  if (dtype == at::kHalf && !options.scaler) {
    throw UsageError(fmt::format(
        "DistributedOptimizer: parameter {} is float16, whose gradients vanish without a loss scale; set scaler",
        gradient.name));
  }
  if (dtype == at::kBFloat16 && options.scaler && options.scaler->dynamic) {
    throw UsageError(
        fmt::format("DistributedOptimizer: parameter {} is bfloat16, which takes no scaler or one with dynamic = false",
                    gradient.name));
  }
  const bool wide = dtype == at::kFloat || dtype == at::kDouble;
  if (wide && options.scaler) {
    throw UsageError(fmt::format("DistributedOptimizer: parameter {} is {}, which needs no scaler; unset it",
                                 gradient.name, c10::toString(dtype)));
  }
  if (wide || dtype == at::kHalf || dtype == at::kBFloat16) return;
  throw UsageError(
      fmt::format("DistributedOptimizer: parameter {} is {}; it must be float16, bfloat16 or float32 (or float64)",
                  gradient.name, c10::toString(dtype)));
}

std::vector<Gradient> dense_gradients(const ModuleTensors& tensors, const DistributedOptimizerOptions& options) {
  auto gradients = gradients_of(tensors);
  for (const auto& gradient : gradients) check_dtype(gradient, options);
  widen_gradients(gradients, options);
  return gradients;
}

std::unique_ptr<Exchange> make_exchange(const std::vector<Gradient>& gradients, const Group& group,
                                        const DistributedOptimizerOptions& options, bool cut) {
  const auto caps = buffer_caps(gradients, options);
  if (cut) return std::make_unique<ReduceScatter>(group, caps);
  std::vector<at::Tensor> parameters;
  for (const auto& gradient : gradients) parameters.push_back(gradient.parameter);
  std::vector<int> owners(parameters.size(), -1);
  assign_owners(parameters, group.size(), owners);
  return std::make_unique<ReduceToOwner>(group, caps, std::move(owners), /*follow=*/false);
}

}  // namespace

Chunk::Chunk(const std::shared_ptr<torch::nn::Module>& module, const Group& group,
             const DistributedOptimizerOptions& options, bool cut)
    : group_(group) {
  const auto state = wrap(module, group, "DistributedOptimizer", options.ignored, /*sync=*/true);
  auto gradients = dense_gradients(state->tensors, options);
  auto exchange = make_exchange(gradients, group, options, cut);
  reducer_ = std::make_unique<Reducer>(std::move(gradients), group,
                                       ReducerOptions{.find_unused_parameters = true, .leave_grad = false},
                                       std::move(exchange));
  for (const auto& bucket : reducer_->buckets()) {
    std::vector<at::Tensor> parameters;
    for (const auto member : bucket.members()) parameters.push_back(reducer_->gradients()[member].parameter);
    std::vector<Range> owners;
    for (int rank = 0; rank < group.size(); ++rank) owners.push_back(reducer_->exchange().kept(bucket, rank));
    buffers_.push_back(std::make_unique<ParameterBuffer>(group, std::move(parameters), bucket.layout(),
                                                         std::move(owners), OnceBufferOptions(),
                                                         Label{-1, -1, "parameters of DistributedOptimizer"}));
  }
  list_pieces();
}

void Chunk::list_pieces() {
  const torch::NoGradGuard no_grad;
  for (size_t number = 0; number < buffers_.size(); ++number) {
    const auto& bucket = reducer_->buckets()[number];
    const auto kept = reducer_->exchange().kept(bucket, group_.rank());
    for (const auto& slice : bucket.layout().overlapping(kept)) {
      OwnedPiece piece{.gradient = bucket.members()[slice.piece],
                       .model = buffers_[number]->part(slice.in_flat),
                       .main = {},
                       .sum = bucket.payload(slice.in_flat),
                       .whole = slice.in_piece.size() == bucket.layout().range(slice.piece).size()};
      const auto& parameter = reducer_->gradients()[piece.gradient].parameter;
      const bool narrow = parameter.element_size() < static_cast<int64_t>(sizeof(float));
      // A whole parameter keeps its shape: optimizers that are not element-wise look at it.
      piece.main = (narrow ? piece.model.to(at::kFloat) : piece.model).detach();
      if (piece.whole) {
        piece.main = piece.main.as_strided(parameter.sizes(), parameter.strides());
        piece.sum = bucket.view(slice.piece);
      }
      piece.main.set_requires_grad(true);
      pieces_.push_back(std::move(piece));
    }
  }
}

void Chunk::publish(const Label& label) {
  first_touch_.touch_all();
  std::for_each(buffers_.rbegin(), buffers_.rend(), [&](const auto& buffer) { buffer->publish(label); });
}

void Chunk::wait(const Label& label, bool at_first_touch) {
  awaited_ = label;
  for (size_t number = 0; number < buffers_.size(); ++number) {
    first_touch_.arm(number, buffers_[number]->part({0, buffers_[number]->layout().size()}));
  }
  if (!at_first_touch) first_touch_.touch_all();
}

std::optional<at::Tensor> Chunk::main_grad(const at::Tensor& parameter) const {
  for (const auto& bucket : reducer_->buckets()) {
    for (size_t place = 0; place < bucket.members().size(); ++place) {
      if (!reducer_->gradients()[bucket.members()[place]].parameter.is_same(parameter)) continue;
      return bucket.present() ? bucket.view(place) : at::Tensor();
    }
  }
  return std::nullopt;
}

std::vector<ParameterRange> Chunk::ranges(int rank) const {
  std::vector<ParameterRange> list;
  for (size_t number = 0; number < buffers_.size(); ++number) {
    const auto& bucket = reducer_->buckets()[number];
    const auto kept = reducer_->exchange().kept(bucket, rank);
    for (const auto& slice : bucket.layout().overlapping(kept)) {
      list.push_back({.name = reducer_->gradients()[bucket.members()[slice.piece]].name,
                      .buffer = number,
                      .world = slice.in_flat,
                      .local = slice.in_flat.normalize(slice.in_flat.begin - kept.begin),
                      .parameter = slice.in_piece});
    }
  }
  return list;
}

std::vector<StatePiece> Chunk::state_pieces(const std::string& prefix) const {
  std::vector<std::vector<StatePiece>> by_gradient(reducer_->gradients().size());
  const auto add = [&](size_t gradient, const Range& range, int owner) {
    const auto& about = reducer_->gradients()[gradient];
    by_gradient[gradient].push_back(
        {.name = prefix + about.name, .parameter = about.parameter, .range = range, .owner = owner});
  };
  for (const auto& bucket : reducer_->buckets()) {
    for (int rank = 0; rank < group_.size(); ++rank) {
      for (const auto& slice : bucket.layout().overlapping(reducer_->exchange().kept(bucket, rank))) {
        add(bucket.members()[slice.piece], slice.in_piece, rank);
      }
    }
  }
  for (const auto& piece : pieces_) {
    for (auto& listed : by_gradient[piece.gradient]) {
      if (listed.owner != group_.rank()) continue;
      listed.updated = piece.main;
      listed.main = piece.copied();
    }
  }
  std::vector<StatePiece> list;
  for (size_t gradient = 0; gradient < by_gradient.size(); ++gradient) {
    if (by_gradient[gradient].empty()) add(gradient, {}, 0);  // no elements
    for (auto& piece : by_gradient[gradient]) list.push_back(std::move(piece));
  }
  return list;
}

}  // namespace shoal
