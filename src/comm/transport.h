#pragma once
// What carries the bytes. One function, so that a decorator (recording, fault injection) is a few lines.

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "shoal/comm/call.h"

namespace shoal {

using Milliseconds = std::chrono::milliseconds;

// One operation in flight inside a transport.
class TransportWork {
 public:
  virtual ~TransportWork() = default;

  virtual bool done() = 0;
  // Waits up to `slice`; true when finished. `remaining` is the time to the deadline, for transports that cannot be
  // asked in slices. Throws std::exception of the transport's own choice when the operation failed.
  virtual bool wait_for(Milliseconds slice, Milliseconds remaining) = 0;
};

// Implementations keep the call's tensors alive until the operation is finished. They need not check arguments; Group
// has.
class Transport {
 public:
  virtual ~Transport() = default;

  virtual std::string name() const = 0;
  virtual std::unique_ptr<TransportWork> issue(const Call& call) = 0;
  // `numel` zeroed elements, see Group::allocate.
  virtual at::Tensor allocate(int64_t numel, const at::TensorOptions& options);
};

// What WorldOptions::transport may be in this build.
std::vector<std::string> transport_names();

}  // namespace shoal
