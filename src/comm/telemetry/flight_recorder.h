#pragma once
// Recorder of this rank's last operations, in a file that survives whatever ends the process.

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/rendezvous/host.h"
#include "comm/telemetry/flight_format.h"

namespace shoal {

// Writes to a mapped file: a record needs no system call, and the system keeps what was written if the process is
// killed. Thread-safe. The destructor records that the process left normally.
class FlightRecorder {
 public:
  // Creates `folder`/rank-RANK.flight, replacing an older file. UsageError names the file and the reason.
  FlightRecorder(const std::string& folder, int rank, int size);
  ~FlightRecorder();
  FlightRecorder(const FlightRecorder&) = delete;
  FlightRecorder& operator=(const FlightRecorder&) = delete;

  // Records all ranks' processes, once the ranks have met.
  void join(const std::vector<ProcessId>& processes);
  // Returns the group's number for enter(). user: the group's line may make room for others once it has gone.
  int add_group(const std::string& name, const std::vector<int>& world_ranks, std::weak_ptr<const void> user);

  // Records the begin of an operation; returns the record's ticket. number: among operations of its kind in the group.
  uint64_t enter(FlightRecord::Kind kind, int group, const Call& call, uint64_t number);
  void issued(uint64_t ticket);
  void finished(uint64_t ticket);
  void note(int group, const std::string& text);
  // The first call counts.
  void failed(const std::string& why);

 private:
  struct Line {
    std::string text;
    std::weak_ptr<const void> user;
  };

  void make_room();
  FlightRecord* find(uint64_t ticket);
  uint64_t add(FlightRecord::Kind kind, int group, int peer, const Fingerprint& print);

  std::mutex mutex_;  // guards groups and failure
  std::string path_;
  int groups_ = 0;           // number of groups so far
  std::vector<Line> lines_;  // in the valid table
  std::byte* data_ = nullptr;
  FlightHeader* header_ = nullptr;
  FlightRecord* records_ = nullptr;
};

}  // namespace shoal
