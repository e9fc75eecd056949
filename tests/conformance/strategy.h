#pragma once
// Registry of the library's strategies, with their intended differences from one process.

#include <map>
#include <string>
#include <vector>

#include "tests/conformance/bench.h"
#include "tests/conformance/wrap.h"

namespace shoal::test {

// Intended difference between a strategy and one process for a behaviour. A test fails if the difference does not
// occur.
struct Exception {
  enum Kind {
    refused,  // on every rank, with an error of shoal's
    throws,   // with an error of libtorch's, about a missing gradient
    differs,  // other numbers, without an error
    lacks,    // cannot be written with this strategy
  };
  Kind kind;
  std::vector<std::string> text;  // contained in the error, or the reason
  int from_ranks = 1;             // minimum number of ranks; with fewer it may equal one process
  // on_network: where ranks share memory it equals one process; in_pairs: also where each rank has a model of its own
  // (ranks_per_host).
  enum Where { anywhere, on_network, on_network_in_pairs };
  Where where = anywhere;
};
// By behaviour. Of several exceptions that apply, the one with the largest from_ranks counts; of equal ones, the first.
using Exceptions = std::multimap<std::string, Exception>;

struct Strategy {
  std::string name;  // name known to variant() of tests/support/variants.h
  // Strategies whose ranks differ between exchanges equal one process if all of them have the same batch.
  Part (*part)(const Group& group);
  Wrap wrap;
  Exceptions exceptions{};
};

const std::vector<Strategy>& strategies();
// One process, without shoal.
const Strategy& one_process();

}  // namespace shoal::test
