#pragma once
// Bench of collectives over every transport, in turn in every round, so that all meet the same state of the machine.

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace shoal::cli {

struct CollectiveOptions {
  std::vector<std::string> ops = {"all_reduce", "reduce_scatter", "all_gather", "barrier"};
  std::vector<std::string> sizes = {"4", "64K", "1M", "16M", "64M"};
  std::vector<std::string> dtypes = {"float32"};
  std::vector<std::string> transports = {"host", "tcp", "gloo"};
  std::vector<std::string> buffers{};  // empty: all that an operation has over a transport
  int rounds = 20;

  // UsageError lists all faults.
  void validate() const;
};

// Valid values of ops, dtypes, transports and buffers, by the option of the command line.
std::map<std::string, std::vector<std::string>> known_collective_values();

// Run by every rank of the job; the result is complete on rank 0. "bytes" is the size of the tensor that all ranks have
// whole: for all_reduce and broadcast the tensor, for reduce_scatter the input, for all_gather the output. It differs
// from the given size where that is not a number of elements, or cannot be divided among the ranks as the operation
// does. With the buffers "once", a gather is the publication by all owners and the wait for all of them. A barrier has
// dtype and buffers "none".
nlohmann::ordered_json bench_collectives(const CollectiveOptions& options);

}  // namespace shoal::cli
