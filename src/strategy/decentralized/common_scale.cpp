#include "strategy/decentralized/common_scale.h"

namespace shoal {
namespace {

bool same(const GradScalerState& a, const GradScalerState& b) {
  return a.scale == b.scale && a.good_steps == b.good_steps && a.hysteresis_left == b.hysteresis_left;
}

}  // namespace

void CommonScale::step(int64_t version, const KnownRanks& known) {
  if (recent_.empty() || !same(scaler_.state(), latest_)) {
    recent_.clear();
    base_ = scaler_.state();
  }
  recent_.push_back({version, false});
  for (auto& step : recent_) step.overflowed = step.overflowed || known.overflowed(step.version);
  scaler_.load(base_);
  for (const auto& step : recent_) {
    scaler_.update(step.overflowed);
    const bool oldest = &step == &recent_.front();
    if (oldest && recent_.size() > static_cast<size_t>(KnownRanks::remembered)) base_ = scaler_.state();
  }
  if (recent_.size() > static_cast<size_t>(KnownRanks::remembered)) recent_.pop_front();
  latest_ = scaler_.state();
}

void CommonScale::resume(const Recent& recent) {
  recent_.clear();
  if (recent.steps.empty()) return;
  const auto now = scaler_.state();
  scaler_.load(recent.before);
  for (const auto& step : recent.steps) scaler_.update(step.overflowed);
  const bool fits = same(scaler_.state(), now);
  scaler_.load(now);
  if (!fits) return;
  base_ = recent.before;
  latest_ = now;
  recent_.assign(recent.steps.begin(), recent.steps.end());
}

}  // namespace shoal
