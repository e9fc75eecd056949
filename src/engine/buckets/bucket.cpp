#include "engine/buckets/bucket.h"

#include <torch/utils.h>

#include <utility>

#include "engine/buckets/reduction_plan.h"
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

FlatLayout lay_out(const std::vector<Gradient>& gradients, const std::vector<size_t>& members,
                   const ReductionPlan& plan) {
  std::vector<int64_t> numels;
  for (const auto member : members) {
    if (!gradients[member].sparse) numels.push_back(gradients[member].parameter.numel());
  }
  return plan.layout(numels, c10::elementSize(gradients[members.front()].dtype()));
}

}  // namespace

Bucket::Bucket(const std::vector<Gradient>& gradients, std::vector<size_t> members, const Group& group,
               const ReductionPlan& plan, bool with_trailer)
    : members_(std::move(members)),
      sparse_(gradients[members_.front()].sparse),
      with_trailer_(with_trailer),
      names_(name_list(gradients, members_)),
      options_(gradients[members_.front()].parameter.options().dtype(gradients[members_.front()].dtype())),
      layout_(lay_out(gradients, members_, plan)) {
  if (sparse_) return;
  for (const auto member : members_) {
    const auto& parameter = gradients[member].parameter;
    likes_.push_back(at::empty_strided(parameter.sizes(), dense_strides(parameter), options().device(at::kMeta)));
  }
  kept_range_ = plan.kept(*this, plan.place(group.rank()));
  transient_ = plan.own_memory || plan.consumed || (kept_range_.empty() && !plan.everywhere());
  if (plan.own_memory) {
    kept_memory_ = group.allocate(kept_range_.size(), options());
  } else if (!transient_) {
    SpareMemory none;
    acquire(group, none);
  }
}

void Bucket::acquire(const Group& group, SpareMemory& spare) {
  if (sparse_) return;
  present_ = true;
  if (flat_.defined()) return;
  lay_out_in(spare.take(group, numel(), options(), least_numel_));
}

void Bucket::lay_out_in(at::Tensor memory) {
  memory_ = std::move(memory);
  flat_ = memory_.narrow(0, 0, numel());
  views_.clear();
  for (size_t place = 0; place < members_.size(); ++place) {
    views_.push_back(view_like(flat_, layout_.range(place).begin, likes_[place]));
  }
  if (with_trailer_) trailer_ = StepTrailer(members_, flat_.narrow(0, payload_numel(), numel() - payload_numel()));
  own_uses_ = memory_.storage().use_count();
}

bool Bucket::moved(size_t place) const {
  const auto& view = views_[place];
  return !same_storage(view, flat_) || view.strides() != likes_[place].strides();
}

void Bucket::renew_view(size_t place) {
  views_[place] = view_like(flat_, layout_.range(place).begin, likes_[place]);
}

void Bucket::leave_memory(const Group& group) {
  const auto former = lost_memory() ? at::Tensor() : flat_;
  lay_out_in(group.allocate(memory_.numel(), options()));
  if (former.defined()) flat_.copy_(former);
}

void Bucket::release(SpareMemory& spare, bool keep) {
  present_ = false;
  if (keep) return;
  views_.clear();
  trailer_ = {};
  flat_.reset();
  auto memory = std::exchange(memory_, {});
  // Otherwise somebody still has a view of it.
  if (memory.defined() && memory.storage().use_count() == 1) spare.put(std::move(memory));
}

}  // namespace shoal
