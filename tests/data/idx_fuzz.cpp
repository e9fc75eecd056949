// libFuzzer target: any bytes are either an IDX file or refused with a UsageError.
//
// The first byte selects whether the others are the file, a file named .gz, or the contents of a gzip file; and the
// dimensions.

#include <zlib.h>

#include "data/idx.h"
#include "shoal/error.h"
#include "tests/support/fuzz_input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace shoal;
  if (size == 0) return 0;
  const auto bytes = test::fuzz_text(data + 1, size - 1);
  const int form = data[0] % 3;
  auto path = test::fuzz_file(form == 0 ? "x" : "x.gz", form == 2 ? "" : bytes);
  if (form == 2) {
    const gzFile file = gzopen(path.c_str(), "wb");
    gzwrite(file, bytes.data(), static_cast<unsigned>(bytes.size()));
    gzclose(file);
  }
  try {
    data::read_idx(path, data[0] / 3 % 2 == 0 ? 1 : 3);
  } catch (const UsageError&) {
  }
  return 0;
}
