#include "shoal/deferred_init.h"

#include <fmt/format.h>
#include <torch/library.h>

#include <set>

#include "module/deferred_shapes.h"
#include "module/deferred_tape.h"
#include "module/permanent_library.h"
#include "shoal/error.h"

namespace shoal {
namespace {

// Whether results depend on shapes only, not on values.
bool only_views(const c10::FunctionSchema& schema) {
  // In-place operators that only change shapes.
  static const std::set<std::string> shapes{"aten::set_",    "aten::resize_",    "aten::resize_as_",
                                            "aten::t_",      "aten::transpose_", "aten::squeeze_",
                                            "aten::detach_", "aten::unsqueeze_", "aten::as_strided_"};
  if (shapes.count(schema.name()) > 0) return true;
  // Without results it is a check of values.
  if (schema.is_mutable() || schema.returns().empty()) return false;
  for (const auto& result : schema.returns()) {
    if (result.alias_info() == nullptr) return false;
  }
  return true;
}

// The argument that is returned as `result`.
const c10::IValue& written_argument(const c10::FunctionSchema& schema, const c10::Argument& result,
                                    const OperatorValues& arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias == nullptr || result.alias_info() == nullptr) continue;
    if (alias->beforeSets() == result.alias_info()->beforeSets()) return arguments[i];
  }
  throw UsageError(
      fmt::format("DeferredInit: {} writes to one tensor and returns another, which cannot be recorded; call it after "
                  "materialize()",
                  schema.name()));
}

void require_deferred_targets(const c10::FunctionSchema& schema, const OperatorValues& arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias == nullptr || !alias->isWrite()) continue;
    for_tensors(arguments[i], [&](const at::Tensor& target) {
      if (DeferredTape::instance().deferred(target)) return;
      throw UsageError(
          fmt::format("DeferredInit: {} writes deferred values to a tensor that has memory; call materialize() first",
                      schema.name()));
    });
  }
}

void defer(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) {
    // Composite operators consist of others, which are dispatched here in turn; some of those are views or copies
    // depending on the tensor.
    op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, deferred_init_key), stack);
    return;
  }
  const c10::impl::ExcludeDispatchKeyGuard below(deferred_init_key);
  const auto& schema = op.schema();
  auto& tape = DeferredTape::instance();
  const auto count = static_cast<std::ptrdiff_t>(schema.arguments().size());
  const OperatorValues arguments(stack->end() - count, stack->end());
  bool any_tensor = false, any_deferred = false;
  c10::Device place(c10::DeviceType::CPU);
  for (const auto& value : arguments) {
    for_tensors(value, [&](const at::Tensor& tensor) {
      any_tensor = true;
      if (any_deferred || !tape.deferred(tensor)) return;
      any_deferred = true;
      place = tensor.device();
    });
  }
  const auto device = schema.argumentIndexWithName("device");
  if (device && arguments[*device].isDevice()) place = arguments[*device].toDevice();
  const bool makes = device && !any_tensor && place.type() != c10::DeviceType::Meta;
  if ((!makes && !any_deferred) || (any_deferred && only_views(schema))) {
    op.callBoxed(stack);
    return;
  }
  if (schema.is_mutable()) {
    require_deferred_targets(schema, arguments);
    stack->erase(stack->end() - count, stack->end());
    for (const auto& result : schema.returns()) stack->push_back(written_argument(schema, result, arguments));
    tape.write_down(op, arguments, {});
    return;
  }
  for (const auto& result : schema.returns()) {
    const auto kind = result.type()->kind();
    if (kind == c10::TypeKind::TensorType || kind == c10::TypeKind::ListType) continue;
    throw UsageError(
        fmt::format("DeferredInit: {} needs the values of a deferred tensor; call materialize() first", schema.name()));
  }
  const auto shapes = shapes_of_results(op, arguments, device);
  if (!shapes) {
    op.callBoxed(stack);
    return;
  }
  stack->erase(stack->end() - count, stack->end());
  OperatorValues results;
  for (const auto& shape : *shapes) {
    results.push_back(with_tensors(shape, [&](const at::Tensor& meta) { return tape.make_like(meta, place); }));
  }
  stack->insert(stack->end(), results.begin(), results.end());
  if (schema.name().rfind("aten::empty", 0) != 0 && schema.name().rfind("aten::new_empty", 0) != 0) {
    tape.write_down(op, arguments, results);
  }
}

void defer_all_operators(torch::Library& library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&defer>());
}

[[gnu::used]] const auto& all_operators = permanent_library("_", deferred_init_key, defer_all_operators);

}  // namespace

DeferredInit::DeferredInit() : guard_(deferred_init_key) {}

bool is_deferred(const at::Tensor& tensor) {
  return tensor.defined() && DeferredTape::instance().deferred(tensor);
}

void materialize(const std::vector<at::Tensor>& tensors) {
  DeferredTape::instance().materialize(tensors);
}

}  // namespace shoal
