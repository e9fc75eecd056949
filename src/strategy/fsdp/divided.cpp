#include "strategy/fsdp/divided.h"

#include <mutex>
#include <set>

namespace shoal {
namespace {

struct Divided {
  std::mutex mutex;
  std::set<const c10::TensorImpl*> parameters;

  static Divided& instance() {
    static auto* divided = new Divided;  // wrappers may go while the process ends
    return *divided;
  }
};

}  // namespace

bool is_divided(const at::Tensor& parameter) {
  const std::lock_guard lock(Divided::instance().mutex);
  return Divided::instance().parameters.contains(parameter.unsafeGetTensorImpl());
}

void mark_divided(const at::Tensor& parameter) {
  const std::lock_guard lock(Divided::instance().mutex);
  Divided::instance().parameters.insert(parameter.unsafeGetTensorImpl());
}

void unmark_divided(const at::Tensor& parameter) {
  const std::lock_guard lock(Divided::instance().mutex);
  Divided::instance().parameters.erase(parameter.unsafeGetTensorImpl());
}

}  // namespace shoal
