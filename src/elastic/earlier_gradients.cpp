#include "elastic/earlier_gradients.h"

#include <fmt/format.h>
#include <torch/utils.h>

#include "memory/views.h"
#include "shoal/error.h"

namespace shoal {
namespace {

// A stand-in has no values: of a gradient that another rank owns, which looks at them, or of one that lies in a buffer.
bool is_stand_in(const at::Tensor& gradient) {
  if (!gradient.has_storage() || gradient.numel() == 0) return false;
  return gradient.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get() == nullptr;
}

}  // namespace

void EarlierGradients::begin_step() {
  there_ = !first_of_them().empty();
  found_.clear();
}

void EarlierGradients::check() {
  if (!std::exchange(there_, false)) return;
  found_ = first_of_them();
}

void EarlierGradients::refuse() const {
  throw UsageError(fmt::format(
      "Elastic: compute added to gradients that {} had before step(){}. A step is undone as a whole when a rank dies: "
      "run all micro-batches of a step in one compute, all but the last under no_sync(), and call zero_grad() after "
      "each step() or at the beginning of compute",
      found() ? "this rank" : "another rank", found() ? fmt::format(", that of {} among them", found_) : ""));
}

std::string EarlierGradients::first_of_them() const {
  const torch::NoGradGuard no_grad;
  for (const auto& parameter : parameters_) {
    const auto& gradient = parameter.value().grad();
    if (!gradient.defined()) continue;
    const bool there = is_stand_in(gradient) ? parts_.stands_for_gradient(parameter.value()) : !is_zero(gradient);
    if (there) return parameter.key();
  }
  return "";
}

}  // namespace shoal
