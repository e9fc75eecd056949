#include "wrappers/calls.h"

#include <c10/util/ScopeExit.h>

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

py::object call_uncompiled(const py::function& function, const py::object& argument) {
  static const py::handle set =
      py::object(py::module_::import("torch._C._dynamo.eval_frame").attr("set_eval_frame")).release();
  const auto former = set(py::none());
  const auto restore = c10::make_scope_exit([&] {
    const py::error_scope pending;  // of the function
    set(former);
  });
  return function(argument);
}

}  // namespace shoal::python
