#pragma once
// Reader of flight recorder files, for another process, during or after the rank's life.

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "comm/rendezvous/host.h"
#include "comm/telemetry/flight_format.h"

namespace shoal {

struct Flight {
  struct Record {
    FlightRecord::Kind kind = FlightRecord::collective;
    int group = -1;  // index in `groups`; -1: it is left out there
    int peer = -1;
    Fingerprint print{};
    int64_t entered = 0;  // see FlightTime
    int64_t issued = 0;
    int64_t finished = 0;
  };
  struct Members {
    int number = 0;
    std::string name;
    std::string world_ranks;  // as rank_list() writes them: few bytes for many files with all ranks
  };

  int rank = 0;
  int size = 0;
  ProcessId process;
  std::string host;
  uint64_t job = 0;
  int64_t epoch_ns = 0;
  int64_t left = 0;
  int64_t failed = 0;
  std::string failure;
  std::vector<Members> groups;
  bool lacks_groups = false;          // some had no room, or have gone
  std::vector<Record> records;        // oldest first
  std::optional<ProcessState> state;  // present state; none: it ran on another host
};

// UsageError names the file and the fault.
Flight read_flight(const std::filesystem::path& file);

// Flights of the newest job in these folders or files, by rank, each process once. UsageError if there is none.
std::vector<Flight> read_flights(const std::vector<std::filesystem::path>& places);

}  // namespace shoal
