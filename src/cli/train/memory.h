#pragma once
// Memory of this process, as counted by the kernel, and of tensors.

#include <torch/types.h>

#include <vector>

namespace shoal::cli {

double resident_mib();       // now
double peak_resident_mib();  // the most since the start or the last reset_peak()
// Shared pages counted in proportion to the processes that map them.
double proportional_mib();
// Restarts the peak from what is resident now. Does nothing where the kernel does not allow it.
void reset_peak();
double mebibytes(const std::vector<at::Tensor>& tensors);

}  // namespace shoal::cli
