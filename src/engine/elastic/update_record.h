#pragma once
// Log of a rank's update in shared memory, from which another rank can finish it.

#include <atomic>
#include <cstdint>

#include "comm/shm/host_memory.h"

namespace shoal {

// Of one rank. Zeros at first; commits are numbered from 1.
struct alignas(128) UpdateRecord {
  std::atomic<int64_t> reached;  // the last meeting that the rank has come to
  std::atomic<int64_t> update;   // number of the commit whose update `mark` is about
  std::atomic<int64_t>
      mark;  // 2 k + 1: chunk k may be half written, its former bytes are in the scratch; 2 k + 2: done
  std::atomic<int64_t> updated;    // number of the last commit whose update is complete
  std::atomic<int64_t> abandoned;  // number of the last commit whose update the rank has abandoned before it began
  std::atomic<int64_t> verdict;    // rank 0's counts for all: 2 n: commit n has failed; 2 n + 1: it has passed
};

// Optimizer state of one tensor that a rank updates. The state's tensors lie in slots beside it.
struct StateEntry {
  static constexpr int most_tensors = 6;
  static constexpr int most_numbers = 6;
  static constexpr int most_dims = 8;
  static constexpr int name_bytes = 32;

  struct Field {
    char name[name_bytes];
    int32_t dtype;
    int32_t dims;
    int64_t sizes[most_dims];
  };
  struct Number {
    char name[name_bytes];
    double value;
  };

  bool exists;  // whether the optimizer has state for the tensor
  int32_t tensors;
  int32_t numbers;
  Field fields[most_tensors];  // field f lies in slot f
  Number values[most_numbers];
};

// Of one tensor, for the step that is committed next.
struct UpdateInputs {
  bool has_gradient;
  bool has_others;  // values that are mixed into the tensor's
  shm::Place gradient;
  shm::Place others;
  double own;  // weight of the tensor's own values
};

}  // namespace shoal
