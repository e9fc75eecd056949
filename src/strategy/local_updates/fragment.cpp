#include "strategy/local_updates/fragment.h"

#include <torch/utils.h>

#include "memory/views.h"

namespace shoal {
namespace {

at::Tensor zeros_like_parameter(const at::Tensor& parameter) {
  const auto options = parameter.options().dtype(widened(parameter.scalar_type())).requires_grad(false);
  return view_like(at::zeros({parameter.numel()}, options), 0, parameter);
}

// Updates theta and u after an exchange; `delta` has theta's dtype.
void update(Fragment::Piece& piece, const at::Tensor& delta, const Averaging&) {
  piece.anchor.sub_(delta);
}

void update(Fragment::Piece& piece, const at::Tensor& delta, const SlowMo& outer) {
  piece.momentum.mul_(outer.slow_momentum);
  piece.anchor.sub_(piece.momentum, outer.slow_lr * piece.rate).sub_(delta, outer.slow_lr);
  if (piece.rate > 0) piece.momentum.add_(delta, 1 / piece.rate);
}

void update(Fragment::Piece& piece, const at::Tensor& delta, const OuterNesterov& outer) {
  piece.momentum.mul_(outer.momentum).add_(delta);
  piece.anchor.sub_(delta, outer.lr).sub_(piece.momentum, outer.lr * outer.momentum);
}

}  // namespace

Fragment::Fragment(std::vector<Piece> pieces, int64_t first_sent, const LocalUpdatesOptions& options)
    : pieces_(std::move(pieces)), first_sent_(first_sent), options_(options) {
  const bool averages = std::holds_alternative<Averaging>(options_.outer);
  for (auto& piece : pieces_) {
    if (!averages) piece.momentum = zeros_like_parameter(piece.parameter);
    // With a narrower reduce_dtype, parameters would be rounded themselves; with an anchor only their change is.
    if (!averages || options_.reduce_dtype) piece.anchor = zeros_like_parameter(piece.parameter);
  }
  anchor();
}

bool Fragment::under_way(int64_t step) const {
  for (int64_t ago = 0; ago < options_.delay; ++ago) {
    if (due(step - ago)) return true;
  }
  return false;
}

void Fragment::anchor() {
  for (auto& piece : pieces_) {
    if (piece.anchor.defined()) piece.anchor.copy_(piece.parameter);
  }
}

void Fragment::note_rates(const torch::optim::Optimizer& optimizer) {
  if (!std::holds_alternative<SlowMo>(options_.outer)) return;
  for (auto& piece : pieces_) piece.rate = optimizer.param_groups()[piece.param_group].options().get_lr();
}

void Fragment::send(const Group& group, const Label& label) {
  std::vector<at::Tensor> parameters;
  std::vector<at::ScalarType> dtypes;
  for (auto& piece : pieces_) {
    piece.passed = false;
    parameters.push_back(piece.parameter);
    dtypes.push_back(options_.reduce_dtype.value_or(widened(piece.parameter.scalar_type())));
  }
  const auto write = [this](size_t i, at::Tensor& out) {
    const auto& piece = pieces_[i];
    if (piece.anchor.defined()) {
      at::sub_out(out, piece.anchor, piece.parameter);
    } else {
      out.copy_(piece.parameter);
    }
  };
  mean_ = Mean(group, parameters, dtypes, write, label);
}

void Fragment::apply(torch::optim::Optimizer& optimizer) {
  const double alpha = options_.alpha.value_or(options_.delay > 0 ? 0.5 : 0.0);
  const auto& mean = mean_.wait();
  for (size_t i = 0; i < pieces_.size(); ++i) {
    auto& piece = pieces_[i];
    if (piece.passed) continue;
    if (piece.anchor.defined()) {
      const auto delta = mean[i].to(piece.anchor.scalar_type());
      std::visit([&](const auto& outer) { update(piece, delta, outer); }, options_.outer);
    }
    const auto& theta = piece.anchor.defined() ? piece.anchor : mean[i];
    piece.parameter.copy_(alpha > 0 ? at::lerp(theta, piece.parameter.to(theta.scalar_type()), alpha) : theta);
    if (options_.reset_optimizer) optimizer.state().erase(piece.parameter.unsafeGetTensorImpl());
  }
  mean_ = {};
}

}  // namespace shoal
