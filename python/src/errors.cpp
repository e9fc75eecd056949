#include <string>
#include <string_view>
#include <utility>

#include "base/called_by_pytorch.h"
#include "bindings.h"
#include "comm/backend/backend_work.h"
#include "comm/group/group_state.h"
#include "shoal/error.h"
#include "wrappers/gil.h"

namespace shoal::python {
namespace {

const char* class_of(const std::exception& error) {
  if (dynamic_cast<const UsageError*>(&error) != nullptr) return "UsageError";
  if (dynamic_cast<const DisagreeError*>(&error) != nullptr) return "DisagreeError";
  if (dynamic_cast<const CommError*>(&error) != nullptr) return "CommError";
  if (dynamic_cast<const StepAbandoned*>(&error) != nullptr) return "StepAbandoned";
  if (dynamic_cast<const JobLost*>(&error) != nullptr) return "JobLost";
  return "Error";
}

// An error's text, of which bytes that are no UTF-8, as a path may have them, become \xNN.
py::object text_of(const std::exception& error) {
  const std::string_view text = error.what();
  return py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "backslashreplace"));
}

py::object class_in_python(const std::exception& error) {
  return py::module_::import("shoal").attr(class_of(error));
}

// CommError with the attributes `rank`, the failed rank of the group, or -1, and `group_ended`: the group is one of
// ranks that an elastic job had before.
void set_attributes(const py::object& raised, const CommError& error) {
  raised.attr("rank") = error.rank();
  raised.attr("group_ended") = dynamic_cast<const GroupEnded*>(&error) != nullptr;
}

void register_comm_error(py::module_& module, py::handle base) {
  static py::handle type = py::exception<CommError>(module, "CommError", base).release();
  type.attr("rank") = -1;
  type.attr("group_ended") = false;
  py::register_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (const CommError& error) {
      const auto raised = type(text_of(error));
      set_attributes(raised, error);
      PyErr_SetObject(type.ptr(), raised.ptr());
    }
  });
}

// pybind11's register_exception() cannot raise a text that is no UTF-8.
template <class E>
py::handle register_error(py::module_& module, const char* name, py::handle base) {
  static py::handle type = py::exception<E>(module, name, base).release();
  py::register_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (const E& error) {
      PyErr_SetObject(type.ptr(), text_of(error).ptr());
    }
  });
  return type;
}

// Raises an error of a hook or an operator as its class in Python, so that loss.backward() and model(x) do.
void raise_in_python(const std::exception_ptr& pending) {
  const py::gil_scoped_acquire lock;
  if (is_called_by_shoal()) return;
  try {
    std::rethrow_exception(pending);
  } catch (const std::exception& error) {
    const auto type = class_in_python(error);
    const auto value = type(text_of(error));
    if (const auto* comm = dynamic_cast<const CommError*>(&error)) set_attributes(value, *comm);
    PyErr_SetObject(type.ptr(), value.ptr());
    python_error raised;
    raised.persist();
    throw raised;
  }
}

// An error in a future, which PyTorch rethrows as often as it is asked: its DistributedDataParallel in backward, whose
// binding takes the class from here.
class FutureError : public torch::PyTorchError {
 public:
  FutureError(const std::exception& error, std::exception_ptr original)
      : PyTorchError(error.what()), original_(std::move(original)), class_(class_of(error)) {}

  PyObject* python_type() override {
    return py::module_::import("shoal").attr(class_).ptr();
  }  // which the module holds
  const std::exception_ptr& original() const { return original_; }

 private:
  std::exception_ptr original_;
  const char* class_;
};

std::exception_ptr for_future(const std::exception_ptr& pending) {
  try {
    std::rethrow_exception(pending);
  } catch (const Error& error) {
    return std::make_exception_ptr(FutureError(error, pending));
  } catch (...) {
    return pending;
  }
}

// For functions of PyTorch that pybind11 binds, which knows neither: torch.ops, and waits for futures.
void register_carriers() {
  py::register_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (python_error& error) {
      error.restore();
    } catch (const FutureError& error) {
      std::rethrow_exception(error.original());
    }
  });
}

}  // namespace

void bind_errors(py::module_& module) {
  const auto error = register_error<Error>(module, "Error", PyExc_RuntimeError);
  register_error<UsageError>(module, "UsageError", error);
  register_error<DisagreeError>(module, "DisagreeError", error);
  register_comm_error(module, error);
  register_error<JobLost>(module, "JobLost", error);
  register_error<StepAbandoned>(module, "StepAbandoned", error);
  register_error<CheckpointError>(module, "CheckpointError", error);
  register_error<InputsExhausted>(module, "InputsExhausted", error);
  register_carriers();
  set_error_translator(&raise_in_python);
  set_future_error(&for_future);
}

}  // namespace shoal::python
