#include "base/print_to_stderr.h"

#include <cstdio>

#include "base/without_sigpipe.h"

namespace shoal {

void write_to_stderr(std::string_view text) {
  const WithoutSigpipe guard;
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

}  // namespace shoal
