#pragma once
// Shapes of the results of an operator that a DeferredInit scope records.

#include <optional>

#include "module/deferred_tape.h"

namespace shoal {

// Tensors of the shapes, strides and dtypes of the operator's results; their values and devices mean nothing. device:
// the index of the operator's argument of that name. None for an operator without tensors among its arguments that has
// to run to show them. UsageError for another one whose shapes depend on values.
std::optional<OperatorValues> shapes_of_results(const c10::OperatorHandle& op, const OperatorValues& arguments,
                                                std::optional<int> device);

}  // namespace shoal
