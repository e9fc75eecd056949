#pragma once
// Registry of the library's strategies, with their intended differences from one process.

#include <map>
#include <string>
#include <vector>

#include "tests/conformance/bench.h"
#include "tests/conformance/wrap.h"

namespace shoal::test {

// What a strategy makes of a behaviour in place of what one process does. One that does not happen fails.
struct Exception {
  enum Kind {
    refused,  // on every rank, by an error of shoal's
    throws,   // by one of libtorch's, of a gradient that is not there
    differs,  // other numbers, no error
    lacks,    // cannot be written
  };
  Kind kind;
  std::vector<std::string> text;  // what the error says; why
  int from_ranks = 1;             // with fewer, and alone, it may be as in one process
  // on_network: where ranks share memory it is as in one process; in_pairs: and where each rank has a model of its own
  // (ranks_per_host).
  enum Where { anywhere, on_network, on_network_in_pairs };
  Where where = anywhere;
};
// By behaviour. Of several that fit, the one from most ranks counts; of these, the first.
using Exceptions = std::multimap<std::string, Exception>;

struct Strategy {
  std::string name;  // that variant() of tests/support/variants.h knows
  // Strategies whose ranks differ between exchanges equal one process when all of them have the same batch.
  Part (*part)(const Group& group);
  Wrap wrap;
  Exceptions exceptions{};
};

const std::vector<Strategy>& strategies();
// One process, without shoal.
const Strategy& one_process();

}  // namespace shoal::test
