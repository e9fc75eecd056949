#include "engine/changes/parameter_watch.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace shoal {
namespace {

const c10::StorageImpl* address_of(const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  return impl->has_storage() ? impl->unsafe_storage().unsafeGetStorageImpl() : nullptr;
}

int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<int64_t>(tensor._version());
}

std::string text(at::ScalarType dtype, at::IntArrayRef sizes, const at::Device& device) {
  return fmt::format("{} [{}] on {}", c10::toString(dtype), fmt::join(sizes, ", "), device.str());
}

const char* trainable(bool requires_grad) {
  return requires_grad ? "with requires_grad" : "without requires_grad";
}

}  // namespace

ParameterWatch::ParameterWatch(std::vector<at::Tensor> parameters, Versions versions)
    : parameters_(std::move(parameters)), known_(parameters_.size()), versions_(versions == Versions::counted) {
  note();
}

bool ParameterWatch::replaced(size_t number) const {
  const auto& now = parameters_[number];
  const auto& known = known_[number];
  return address_of(now) != known.address || now.storage_offset() != known.offset || now.scalar_type() != known.dtype ||
         now.sizes() != at::IntArrayRef(known.sizes) || now.strides() != at::IntArrayRef(known.strides);
}

bool ParameterWatch::changed(size_t number) const {
  return replaced(number) || (versions_ && version_of(parameters_[number]) != known_[number].version);
}

bool ParameterWatch::changed() const {
  for (size_t number = 0; number < parameters_.size(); ++number) {
    if (changed(number) || trainable_changed(number)) return true;
  }
  return false;
}

bool ParameterWatch::other_shape(size_t number) const {
  return parameters_[number].sizes() != at::IntArrayRef(known_[number].sizes);
}

bool ParameterWatch::other_kind(size_t number) const {
  const auto& now = parameters_[number];
  const auto& known = known_[number];
  return now.scalar_type() != known.dtype || now.device() != known.device ||
         now.sizes() != at::IntArrayRef(known.sizes);
}

bool ParameterWatch::other_floating_dtype(size_t number) const {
  const auto& now = parameters_[number];
  const auto& known = known_[number];
  return now.scalar_type() != known.dtype && now.is_floating_point() && at::isFloatingType(known.dtype) &&
         now.device() == known.device && now.sizes() == at::IntArrayRef(known.sizes);
}

bool ParameterWatch::trainable_changed(size_t number) const {
  return parameters_[number].requires_grad() != known_[number].requires_grad;
}

std::string ParameterWatch::describe(size_t number) const {
  const auto& now = parameters_[number];
  const auto& known = known_[number];
  if (!other_kind(number)) {
    return fmt::format("it is {} now, and was {}", trainable(now.requires_grad()), trainable(known.requires_grad));
  }
  return fmt::format("it is {} now, and was {}", text(now.scalar_type(), now.sizes(), now.device()),
                     text(known.dtype, known.sizes, known.device));
}

void ParameterWatch::note() {
  for (size_t number = 0; number < parameters_.size(); ++number) note(number);
}

void ParameterWatch::note(size_t number) {
  const auto& now = parameters_[number];
  auto& known = known_[number];
  known.address = address_of(now);
  known.storage.reset();
  if (known.address != nullptr) known.storage = now.unsafeGetTensorImpl()->unsafe_storage().getWeakStorageImpl();
  known.offset = now.storage_offset();
  known.sizes.assign(now.sizes().begin(), now.sizes().end());
  known.strides.assign(now.strides().begin(), now.strides().end());
  known.dtype = now.scalar_type();
  known.device = now.device();
  known.requires_grad = now.requires_grad();
  known.version = versions_ ? version_of(now) : 0;
}

}  // namespace shoal
