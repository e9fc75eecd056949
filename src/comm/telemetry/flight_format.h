#pragma once
// File format of the flight recorder. A writer may be killed between any two instructions, so that nothing depends on a
// final write: fields are zero until they are known, and a record is valid once its ticket is written.

#include <atomic>
#include <cstdint>

#include "comm/agreement/fingerprint.h"

namespace shoal {

constexpr char flight_magic[8] = {'S', 'H', 'O', 'A', 'L', 'F', 'R', '2'};
constexpr uint32_t flight_capacity = 1024;  // number of records; new ones overwrite the oldest
constexpr uint32_t flight_group_bytes = 64 << 10;

// Nanoseconds of the steady clock, which the processes of one host share; 0: not yet.
using FlightTime = std::atomic<int64_t>;

struct FlightRecord {
  enum Kind : int32_t { collective, message, wait, note };  // wait: for data that peers publish on their own

  std::atomic<uint64_t> ticket;  // number of the record, from 1; 0: empty or incomplete
  int32_t kind;
  int32_t group;  // its number in FlightHeader::tables
  int32_t peer;   // of a message
  int32_t padding;
  Fingerprint print;  // `number`: of the collective in its group, plus 1. A note has `text` only
  FlightTime entered;
  FlightTime issued;
  FlightTime finished;
};

// Lines of groups: "NUMBER<tab>NAME<tab>RANKS<newline>", with ranks as rank_list() writes them.
struct FlightGroups {
  std::atomic<uint32_t> bytes;  // number of valid bytes in `text`
  char text[flight_group_bytes];
};

struct FlightHeader {
  char magic[8];
  uint32_t record_bytes;  // differs between builds, whose records are then not read
  uint32_t capacity;
  int32_t rank;
  int32_t size;
  int32_t pid;
  int32_t padding;
  uint64_t process_start;       // see ProcessId
  char host[128];               // host_identity()
  uint64_t job;                 // the same on all ranks, different between jobs; 0: the ranks have not met
  int64_t epoch_ns;             // difference between times and nanoseconds since 1970
  std::atomic<uint64_t> begun;  // number of records so far
  FlightTime left;              // when the process left the job normally
  FlightTime failed;            // when the process noticed the first failure
  char failure[1024];
  std::atomic<uint32_t> groups_left_out;  // number of groups without a line: there was no room, or the group has gone
  std::atomic<uint32_t> table;            // index of the valid table; lines move to the other one when some are dropped
  FlightGroups tables[2];
};

constexpr uint64_t flight_bytes = sizeof(FlightHeader) + flight_capacity * sizeof(FlightRecord);

}  // namespace shoal
