#include "data/image_dataset.h"

#include <fmt/format.h>

#include <utility>

#include "shoal/error.h"

namespace shoal::data {

ImageDataset::ImageDataset(at::Tensor pixels, at::Tensor labels, Normalisation normalisation, at::ScalarType dtype)
    : pixels_(std::move(pixels)), labels_(std::move(labels)), normalisation_(normalisation), dtype_(dtype) {
  if (pixels_.scalar_type() != at::kByte || pixels_.dim() != 2) throw UsageError("images: pixels must be uint8 [n, k]");
  if (labels_.scalar_type() != at::kLong || labels_.dim() != 1) throw UsageError("images: labels must be int64 [n]");
  if (pixels_.size(0) != labels_.size(0)) {
    throw UsageError(fmt::format("{} images but {} labels", pixels_.size(0), labels_.size(0)));
  }
}

std::optional<size_t> ImageDataset::size() const {
  return static_cast<size_t>(labels_.size(0));
}

Batch ImageDataset::get_batch(c10::ArrayRef<size_t> indices) {
  const auto chosen = index_tensor(indices, *size());
  auto images = pixels_.index_select(0, chosen).to(dtype_);
  images.div_(255).sub_(normalisation_.mean).div_(normalisation_.deviation);
  return {std::move(images), labels_.index_select(0, chosen)};
}

}  // namespace shoal::data
