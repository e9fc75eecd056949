// libFuzzer target: any bytes are either a topology or refused with a UsageError.

#include "shoal/error.h"
#include "shoal/topology.h"
#include "tests/support/fuzz_input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace shoal;
  constexpr int64_t quick = 1 << 16;  // ranks x ranks x rounds
  try {
    const auto topology = read_topology(test::fuzz_file("topology.json", test::fuzz_text(data, size)));
    topology.fingerprint();
    if (int64_t{topology.size()} * topology.size() * topology.period() <= quick) (void)topology.report();
  } catch (const UsageError&) {
  }
  return 0;
}
