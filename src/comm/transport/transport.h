#pragma once
// Interface of transports. It has one function, so that a decorator (recording, fault injection) is a few lines.

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "shoal/detail/call.h"

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
  // What is missing, for the message of a wait that has run out of time; empty where the transport cannot tell.
  virtual std::string waits_for() { return ""; }
};

// Implementations keep the call's tensors alive until the operation is finished. They need not check arguments; Group
// has.
class Transport {
 public:
  virtual ~Transport() = default;

  virtual std::string name() const = 0;
  virtual std::unique_ptr<TransportWork> issue(const Call& call) = 0;
  // Whether destroying it waits for operations in flight, which may never end once a peer has failed.
  virtual bool joins_threads() const { return false; }
  // Whether ranks that call different things are told so before anybody's data are touched.
  virtual bool checks_agreement() const { return false; }
  // `numel` zeroed elements, see Group::allocate.
  virtual at::Tensor allocate(int64_t numel, const at::TensorOptions& options);
};

// What WorldOptions::transport may be in this build.
std::vector<std::string> transport_names();

}  // namespace shoal
