#pragma once
// Checks for modules that a wrapper cannot train, which would show late or never.

#include <string>
#include <vector>

#include "module/walk.h"

namespace shoal {

// Whether parameters may be in another wrapper that allows it, too, of which each acts in backwards after its own
// forwards.
enum class OtherWrappers { refused, allowed };

// These throw a UsageError that names the tensor. wrapper, owner: class, for errors. Not collective: ranks have the
// same module.

// A tensor on the meta device, an expanded or sparse one, or a parameter of a wrapper that has been destroyed. name:
// with its kind, such as "parameter fc.weight".
void require_usable(const at::Tensor& tensor, const std::string& name, const std::string& owner);
// Such tensors of a module, and parameters of other wrappers.
void require_usable(const ModuleTensors& tensors, const std::string& wrapper, OtherWrappers other_wrappers);
// For wrappers whose ranks hold the same parameters: forward changes the rows of this rank's batch (max_norm of an
// embedding).
void require_constant_in_forward(const ModuleTensors& tensors, const std::string& wrapper);

}  // namespace shoal
