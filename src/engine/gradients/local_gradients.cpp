#include "engine/gradients/local_gradients.h"

#include <fmt/format.h>

#include <mutex>
#include <unordered_map>

#include "memory/views.h"
#include "shoal/error.h"

namespace shoal {
namespace {

// Weak: the memory may go, but no other tensor gets the address.
using Mark = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// One per process, because optimizers and wrappers share nothing but the parameters.
struct Marks {
  std::mutex mutex;
  std::unordered_map<const c10::TensorImpl*, Mark> gradients;

  static Marks& instance() {
    static auto* marks = new Marks;  // never destroyed: wrappers may outlive static objects
    return *marks;
  }
};

}  // namespace

void mark_local(const at::Tensor& parameter) {
  const std::lock_guard lock(Marks::instance().mutex);
  Marks::instance().gradients.insert_or_assign(parameter.unsafeGetTensorImpl(),
                                               Mark(parameter.grad().getIntrusivePtr()));
}

void unmark_local(const at::Tensor& parameter) {
  const std::lock_guard lock(Marks::instance().mutex);
  Marks::instance().gradients.erase(parameter.unsafeGetTensorImpl());
}

bool has_local_gradient(const at::Tensor& parameter) {
  const auto& gradient = parameter.grad();
  if (!gradient.defined()) return false;
  {
    auto& marks = Marks::instance();
    const std::lock_guard lock(marks.mutex);
    const auto mark = marks.gradients.find(parameter.unsafeGetTensorImpl());
    if (mark == marks.gradients.end() || mark->second.lock().get() != gradient.unsafeGetTensorImpl()) return false;
  }
  return !is_zero(gradient);
}

void require_no_local_gradient(const at::Tensor& parameter, const std::string& who, const std::string& name) {
  if (!has_local_gradient(parameter)) return;
  throw UsageError(fmt::format(
      "{}: the gradient of parameter {} has been accumulated under no_sync and was not averaged over ranks: "
      "run the last micro-batch's backward outside no_sync, or drop the gradient with zero_grad()",
      who, name));
}

void refuse_to_clip_shares() {
  throw UsageError(
      "Elastic: gradients are clipped within a slice of the batch, and a rank may have several: clip in the third "
      "argument of step(), which is called after all of them");
}

}  // namespace shoal
