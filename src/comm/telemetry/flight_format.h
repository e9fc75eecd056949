#pragma once
// Format of a flight recorder file. A writer may be killed between any two instructions, so nothing in the file depends
// on a last action: fields are zero until they are known, and a record counts once its ticket is written.

#include <atomic>
#include <cstdint>

#include "comm/agreement/fingerprint.h"

namespace shoal {

constexpr char flight_magic[8] = {'S', 'H', 'O', 'A', 'L', 'F', 'R', '1'};
constexpr uint32_t flight_capacity = 1024;  // records; the oldest make room
constexpr uint32_t flight_group_bytes = 64 << 10;

// Times are nanoseconds of the steady clock, which processes of one host share; 0: not yet.
using FlightTime = std::atomic<int64_t>;

struct FlightRecord {
  enum Kind : int32_t { collective, message, wait, note };  // wait: for something that peers publish on their own

  std::atomic<uint64_t> ticket;  // number of the record, from 1; 0: nothing here, or not complete
  int32_t kind;
  int32_t group;  // its line in FlightHeader::groups
  int32_t peer;   // of a message
  int32_t padding;
  Fingerprint print;  // `number`: the collective's number in its group plus 1. Of a note: only `text`
  FlightTime entered;
  FlightTime issued;
  FlightTime finished;
};

struct FlightHeader {
  char magic[8];
  uint32_t record_bytes;  // another build's records are not read as ours
  uint32_t capacity;
  int32_t rank;
  int32_t size;
  int32_t pid;
  int32_t padding;
  uint64_t process_start;       // see ProcessId
  char host[128];               // host_identity()
  uint64_t job;                 // equal on all ranks, different from job to job; 0: the ranks have not met
  int64_t epoch_ns;             // what to add to a time for nanoseconds since 1970
  std::atomic<uint64_t> begun;  // records so far
  FlightTime left;              // when the process left the job in order
  FlightTime failed;            // when it noticed the first failure
  char failure[1024];
  std::atomic<uint32_t> group_bytes;  // of `groups` that count
  char groups[flight_group_bytes];    // "NAME<tab>RANK,RANK,...<newline>"
};

constexpr uint64_t flight_bytes = sizeof(FlightHeader) + flight_capacity * sizeof(FlightRecord);

}  // namespace shoal
