// libFuzzer target: any bytes are either a safetensors file or refused with a CheckpointError (BEY05).

#include "tests/checkpoint/read_all.h"
#include "tests/support/fuzz_input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace shoal;
  test::read_all(test::fuzz_file("x.safetensors", test::fuzz_text(data, size)));
  return 0;
}
