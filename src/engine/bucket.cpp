#include "engine/bucket.h"

#include <torch/utils.h>

#include "memory/views.h"

namespace shoal {
namespace {

std::string name_list(const std::vector<Gradient>& gradients, const std::vector<size_t>& members) {
  constexpr size_t shown = 3;
  std::string text = "gradients of ";
  for (size_t i = 0; i < members.size() && i < shown; ++i) text += (i > 0 ? ", " : "") + gradients[members[i]].name;
  if (members.size() > shown) text += " and " + std::to_string(members.size() - shown) + " more";
  return text;
}

}  // namespace

Bucket::Bucket(const std::vector<Gradient>& gradients, std::vector<size_t> members, const Group& group)
    : members_(std::move(members)),
      sparse_(gradients[members_.front()].sparse),
      names_(name_list(gradients, members_)) {
  if (sparse_) return;
  std::vector<int64_t> numels;
  for (const auto member : members_) numels.push_back(gradients[member].parameter.numel());
  const auto& first = gradients[members_.front()].parameter;
  const FlatLayout layout(numels, first.element_size());
  allocate(group, layout.size(), first.options());
  for (size_t place = 0; place < members_.size(); ++place) {
    views_.push_back(view_like(flat_, layout.range(place).begin, gradients[members_[place]].parameter));
  }
}

Bucket Bucket::weight_only(const Group& group) {
  Bucket bucket;
  bucket.names_ = "weight";
  bucket.allocate(group, 0, at::TensorOptions(at::kFloat));
  return bucket;
}

void Bucket::allocate(const Group& group, int64_t payload, const at::TensorOptions& options) {
  payload_ = payload;
  const auto tail = static_cast<int64_t>(members_.size()) + 1;
  flat_ = group.allocate(payload + tail, options.requires_grad(false));
}

bool Bucket::exact_weight() const {
  return !sparse_ && flat_.element_size() >= 4;
}

at::Tensor Bucket::payload() const {
  return flat_.narrow(0, 0, payload_);
}

void Bucket::write_tail(const std::vector<bool>& used, double weight) {
  // Filled on the host and copied at once: one small operation instead of one per member.
  auto tail = at::empty({static_cast<int64_t>(members_.size()) + 1}, at::kDouble);
  auto* value = tail.data_ptr<double>();
  for (const auto member : members_) *value++ = used[member] ? 1 : 0;
  *value = weight;
  flat_.narrow(0, payload_, tail.numel()).copy_(tail);
}

double Bucket::weight() const {
  return flat_[flat_.numel() - 1].item<double>();
}

std::vector<bool> Bucket::used_anywhere() const {
  const auto flags = flat_.narrow(0, payload_, static_cast<int64_t>(members_.size())).to(at::kCPU, at::kDouble);
  const auto* value = flags.data_ptr<double>();
  std::vector<bool> used;
  for (size_t place = 0; place < members_.size(); ++place) used.push_back(value[place] > 0);
  return used;
}

}  // namespace shoal
