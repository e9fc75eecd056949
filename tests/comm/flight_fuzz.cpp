// libFuzzer target: any bytes are either a flight, which gets a verdict, or refused with a UsageError.
//
// The bytes are the header up to its tables, two bytes for the length of the first table, that table, and records. The
// target adds what makes it a file of this version and of the same job as the valid flight beside it.

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "comm/telemetry/flight_recorder.h"
#include "comm/telemetry/verdict.h"
#include "shoal/error.h"
#include "tests/support/fuzz_input.h"

namespace shoal {
namespace {

constexpr uint64_t job = 7;

template <class Value>
void put(std::string& bytes, size_t place, const Value& value) {
  std::memcpy(bytes.data() + place, &value, sizeof value);
}

std::string flight_file(std::string_view input) {
  std::string bytes(flight_bytes, '\0');
  const auto take = [&](size_t place, size_t size) {
    size = std::min(size, input.size());
    std::memcpy(bytes.data() + place, input.data(), size);
    input.remove_prefix(size);
  };
  take(0, offsetof(FlightHeader, tables));
  uint16_t length = 0;
  std::memcpy(&length, input.data(), std::min(sizeof length, input.size()));
  input.remove_prefix(std::min(sizeof length, input.size()));
  take(offsetof(FlightHeader, tables), std::min<size_t>(length, sizeof(FlightGroups)));
  take(sizeof(FlightHeader), flight_capacity * sizeof(FlightRecord));
  put(bytes, 0, flight_magic);
  put(bytes, offsetof(FlightHeader, record_bytes), static_cast<uint32_t>(sizeof(FlightRecord)));
  put(bytes, offsetof(FlightHeader, capacity), flight_capacity);
  put(bytes, offsetof(FlightHeader, job), job);
  return bytes;
}

// Flight of rank 1 of 2, with one call.
std::string good_flight() {
  static const test::TempFolder folder;
  {
    FlightRecorder recorder(folder.path(), 1, 2);
    const int group = recorder.add_group("world", {0, 1}, {});
    for (uint64_t number = 0; number < 3; ++number) recorder.enter(FlightRecord::collective, group, Call(), number);
  }
  std::ifstream file(folder.file("rank-1.flight"), std::ios::binary);
  std::string bytes{std::istreambuf_iterator<char>(file), {}};
  put(bytes, offsetof(FlightHeader, job), job);
  return bytes;
}

}  // namespace
}  // namespace shoal

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace shoal;
  static const auto good = test::fuzz_file("rank-1.flight", good_flight());
  try {
    const auto flights =
        read_flights({test::fuzz_file("rank-0.flight", flight_file(test::fuzz_text(data, size))), good});
    verdict(flights);
    for (const auto& flight : flights) {
      for (const auto& record : flight.records) describe(record);
    }
  } catch (const UsageError&) {
  }
  return 0;
}
