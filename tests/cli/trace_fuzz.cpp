// libFuzzer target: any bytes are either merged or refused with a UsageError.

#include "cli/telemetry/trace_merge.h"
#include "shoal/error.h"
#include "tests/support/fuzz_input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace shoal;
  try {
    cli::merge_traces({test::fuzz_file("rank-0.json", test::fuzz_text(data, size))}, "/dev/null");
  } catch (const UsageError&) {
  }
  return 0;
}
