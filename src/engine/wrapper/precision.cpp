#include "shoal/precision.h"

#include <ATen/autocast_mode.h>

namespace shoal {

Precision::Scope::Scope(const Precision& precision, at::DeviceType device)
    : active_(precision.compute.has_value()), device_(device) {
  if (!active_) return;
  was_enabled_ = at::autocast::is_autocast_enabled(device_);
  dtype_before_ = at::autocast::get_autocast_dtype(device_);
  at::autocast::set_autocast_enabled(device_, true);
  at::autocast::set_autocast_dtype(device_, *precision.compute);
  at::autocast::increment_nesting();
}

Precision::Scope::~Scope() {
  if (!active_) return;
  // Only the outermost scope clears the cached casts of parameters.
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_, was_enabled_);
  at::autocast::set_autocast_dtype(device_, dtype_before_);
}

}  // namespace shoal
