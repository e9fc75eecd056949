#pragma once
// Progress of operations for which nobody waits.

#include <chrono>
#include <memory>

#include "comm/backend/flight.h"
#include "comm/shm/host_memory.h"

namespace shoal {

// Thread that ends flights, so that futures complete, dropped handles are released and peers get their messages while
// this rank's own threads do something else. It starts with the first flight. It sleeps while there are no flights, and
// otherwise until a peer has done something; operations that are waited for at once never wake it. A callback that it
// runs may wait for other flights, which another thread ends meanwhile; so callbacks of several flights may run at the
// same time. Thread-safe.
class Progress {
 public:
  // memory: of this process, or nullptr.
  explicit Progress(std::shared_ptr<shm::HostMemory> memory);
  // Ends the thread. Flights in flight stay so.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void add(std::shared_ptr<BackendFlight> flight);
  // Somebody depends on the end of a flight without waiting for it.
  void hurry();
  // A callback that may wait for other flights is about to run on this thread.
  void make_way();
  // Waits until no thread runs callbacks of futures: an interpreter that ends meanwhile would end the process with
  // them.
  void await_callbacks(std::chrono::milliseconds limit);
  bool is_forked_copy() const;

 private:
  struct State;

  std::shared_ptr<State> state_;
};

}  // namespace shoal
