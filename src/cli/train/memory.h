#pragma once
// Memory of this process, as reported by the kernel.

namespace shoal::cli {

double resident_mib();       // now
double peak_resident_mib();  // maximum since the start or the last reset_peak()
// Shared pages are divided among the processes that map them.
double proportional_mib();
// Resets the peak to the present value. No effect if the kernel does not allow it.
void reset_peak();

}  // namespace shoal::cli
