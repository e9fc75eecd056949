#pragma once
// The last operations of this rank, in a file that survives whatever ends the process.

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/rendezvous/host.h"
#include "comm/telemetry/flight_format.h"

namespace shoal {

// Writes to mapped memory of a file: a record costs no system call, and the system keeps what was written when the
// process is killed. Thread-safe. Its destructor says that the process has left in order.
class FlightRecorder {
 public:
  // Makes `folder`/rank-RANK.flight in place of an older one. UsageError that names the file and the reason.
  FlightRecorder(const std::string& folder, int rank, int size);
  ~FlightRecorder();
  FlightRecorder(const FlightRecorder&) = delete;
  FlightRecorder& operator=(const FlightRecorder&) = delete;

  // All ranks of the job; once they have met.
  void join(const std::vector<ProcessId>& processes);
  // Its number for enter(); -1 where there is no room for its name.
  int add_group(const std::string& name, const std::vector<int>& world_ranks);

  // The operation begins: the record's ticket. `number`: of the operation among those of its kind in the group.
  uint64_t enter(FlightRecord::Kind kind, int group, const Call& call, uint64_t number);
  void issued(uint64_t ticket);
  void finished(uint64_t ticket);
  void note(int group, const std::string& text);
  // The first one stays.
  void failed(const std::string& why);

 private:
  FlightRecord* find(uint64_t ticket);
  uint64_t add(FlightRecord::Kind kind, int group, int peer, const Fingerprint& print);

  std::mutex mutex_;  // of groups and failure
  std::string path_;
  int groups_ = 0;
  std::byte* data_ = nullptr;
  FlightHeader* header_ = nullptr;
  FlightRecord* records_ = nullptr;
};

}  // namespace shoal
