#include "engine/hooks/residuals.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include "shoal/error.h"

namespace shoal {
namespace {
constexpr const char* prefix = "owed.";
}  // namespace

at::ScalarType wide(at::ScalarType dtype) {
  return c10::elementSize(dtype) < 4 ? at::kFloat : dtype;
}

at::Tensor piece_of(const at::Tensor& flat, const GradientPiece& piece) {
  return flat.as_strided(piece.gradient.sizes(), piece.gradient.strides(),
                         flat.storage_offset() + piece.in_bucket.begin);
}

at::Tensor Residuals::add_to(const GradientBucket& bucket) const {
  auto wanted = bucket.gradients.to(wide(bucket.gradients.scalar_type()));
  for (const auto& piece : bucket.pieces) {
    const auto owed = owed_.find(piece.name);
    if (owed == owed_.end()) continue;
    if (owed->second.sizes() != piece.gradient.sizes()) {
      throw UsageError(
          fmt::format("communication hook: its state for {} has shape [{}], the gradient [{}]; load state "
                      "of the same model and ranks",
                      piece.name, fmt::join(owed->second.sizes(), ", "), fmt::join(piece.gradient.sizes(), ", ")));
    }
    piece_of(wanted, piece).add_(owed->second);
  }
  return wanted;
}

void Residuals::keep(const GradientPiece& piece, at::Tensor missing) {
  if (on_) owed_[piece.name] = missing.nan_to_num_(0, 0, 0);
}

void Residuals::keep_all(const GradientBucket& bucket, const at::Tensor& missing) {
  if (!on_) return;
  for (const auto& piece : bucket.pieces) keep(piece, piece_of(missing, piece).clone());
}

void Residuals::save(CommunicationHook::State& state) const {
  for (const auto& [name, owed] : owed_) state[prefix + name] = owed;
}

bool Residuals::load(const std::string& name, const at::Tensor& value) {
  if (!on_ || !name.starts_with(prefix)) return false;
  owed_[name.substr(std::string(prefix).size())] = value.clone();
  return true;
}

}  // namespace shoal
