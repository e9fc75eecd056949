#include "wrappers/calls.h"

#include <string>

#include "comm/group/group_state.h"
#include "shoal/error.h"

namespace shoal::python {
namespace {

bool is_a(const py::error_already_set& raised, const char* name) {
  return raised.matches(py::module_::import("shoal").attr(name));
}

}  // namespace

SharedObject& last_raised() {
  thread_local SharedObject raised;
  return raised;
}

void rethrow(py::error_already_set& raised) {
  if (raised.trace()) PyException_SetTraceback(raised.value().ptr(), raised.trace().ptr());
  last_raised() = is_a(raised, "Error") ? share(raised.value()) : nullptr;
  const auto text = py::str(raised.value()).cast<std::string>();
  if (is_a(raised, "CommError")) {
    if (raised.value().attr("group_ended").cast<bool>()) throw GroupEnded(text);
    throw CommError(text, raised.value().attr("rank").cast<int>());
  }
  if (is_a(raised, "DisagreeError")) throw DisagreeError(text);
  if (is_a(raised, "UsageError")) throw UsageError(text);
  if (is_a(raised, "StepAbandoned")) throw StepAbandoned(text);
  if (is_a(raised, "JobLost")) throw JobLost(text);
  raised.restore();
  python_error kept;
  kept.persist();
  throw kept;
}

}  // namespace shoal::python
