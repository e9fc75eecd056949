#include "comm/telemetry/flight_reader.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <map>
#include <set>
#include <sstream>
#include <tuple>

#include "base/input_file.h"
#include "base/limits.h"
#include "base/printable.h"
#include "base/rank_list.h"
#include "shoal/error.h"

namespace shoal {
namespace {

namespace fs = std::filesystem;

// Limits of times in nanoseconds, chosen so that their sum does not overflow.
constexpr int64_t longest_time = int64_t{1} << 61;  // 73 years after boot
constexpr int64_t latest_epoch = int64_t{1} << 62;  // the year 2116

std::vector<char> contents(const InputFile& file) {
  std::vector<char> bytes(flight_bytes);
  file.read(bytes.data(), static_cast<int64_t>(bytes.size()), 0);
  return bytes;
}

template <size_t room>
std::string text_of(const char (&text)[room]) {
  return {text, strnlen(text, room)};
}

bool is_time(int64_t nanoseconds) {
  return nanoseconds >= 0 && nanoseconds <= longest_time;
}

// Validates the file's content, so that allocations stay small and sums and differences of times do not overflow.
void check(const Flight& flight, const fs::path& file) {
  const auto refuse = [&](const std::string& what) { throw UsageError(fmt::format("{}: {}", file.string(), what)); };
  if (flight.size < 1 || flight.size > max_ranks) {
    refuse(fmt::format("the file says {} ranks; valid are 1 to {}", flight.size, max_ranks));
  }
  if (flight.rank < 0 || flight.rank >= flight.size) {
    refuse(fmt::format("the file says rank {} of {}", flight.rank, flight.size));
  }
  const bool epoch = flight.epoch_ns >= 0 && flight.epoch_ns <= latest_epoch;
  if (!epoch || !is_time(flight.left) || !is_time(flight.failed)) {
    refuse("an invalid time");
  }
  std::set<std::string> lists;
  for (const auto& group : flight.groups) {
    if (!lists.insert(group.world_ranks).second) continue;
    std::vector<bool> members(flight.size);
    for (const int rank : parse_rank_list(group.world_ranks, flight.size)) {
      if (rank >= 0 && rank < flight.size && !members[rank]) {
        members[rank] = true;
        continue;
      }
      refuse(fmt::format("rank {} in group '{:.100}', twice or beyond the {} ranks", rank, group.name, flight.size));
    }
  }
  for (const auto& record : flight.records) {
    const bool known = record.kind >= FlightRecord::collective && record.kind <= FlightRecord::note;
    if (!known || !is_call(record.print)) refuse("a record with an unknown operation");
    if (!is_time(record.entered) || !is_time(record.issued) || !is_time(record.finished)) {
      refuse("a record with an invalid time");
    }
  }
}

std::vector<Flight::Members> groups_of(const FlightHeader& header) {
  std::vector<Flight::Members> list;
  const auto& table = header.tables[header.table.load() % 2];
  std::istringstream lines(std::string(table.text, std::min(table.bytes.load(), flight_group_bytes)));
  for (std::string line; std::getline(lines, line);) {
    auto& group = list.emplace_back();
    std::istringstream fields(line);
    std::string number;
    std::getline(fields, number, '\t');
    std::getline(fields, group.name, '\t');
    std::getline(fields, group.world_ranks);
    std::from_chars(number.data(), number.data() + number.size(), group.number);
  }
  return list;
}

// Compares two readings: a record that was being written during the first one has another ticket in the second.
std::vector<Flight::Record> records_of(const std::vector<char>& first, const std::vector<char>& second,
                                       const std::vector<Flight::Members>& groups) {
  const auto record = [](const std::vector<char>& bytes, uint64_t index) {
    return reinterpret_cast<const FlightRecord*>(bytes.data() + sizeof(FlightHeader)) + index;
  };
  std::map<int, int> places;  // in `groups`, by number
  for (const auto& group : groups) places.emplace(group.number, static_cast<int>(places.size()));
  std::map<uint64_t, Flight::Record> by_ticket;
  for (uint64_t i = 0; i < flight_capacity; ++i) {
    const auto& found = *record(first, i);
    if (found.ticket == 0 || found.ticket != record(second, i)->ticket) continue;
    auto print = found.print;
    print.text[text_bytes - 1] = 0;
    const auto place = places.find(found.group);
    by_ticket[found.ticket] = {.kind = static_cast<FlightRecord::Kind>(found.kind),
                               .group = place == places.end() ? -1 : place->second,
                               .peer = found.peer,
                               .print = print,
                               .entered = found.entered,
                               .issued = found.issued,
                               .finished = found.finished};
  }
  std::vector<Flight::Record> list;
  for (auto& [ticket, found] : by_ticket) list.push_back(found);
  return list;
}

// Since its host started.
int64_t last_time(const Flight& flight) {
  return flight.records.empty() ? 0 : flight.records.back().entered;
}

// A job that runs is the newest one. Of one host the steady clock counts, because the other one may be set.
bool is_older(const Flight& a, const Flight& b) {
  const auto runs = [](const Flight& flight) {
    return flight.left == 0 && flight.state && *flight.state != ProcessState::gone;
  };
  if (runs(a) != runs(b)) return runs(b);
  const bool one_clock = a.host == b.host;
  return last_time(a) + (one_clock ? 0 : a.epoch_ns) < last_time(b) + (one_clock ? 0 : b.epoch_ns);
}

}  // namespace

Flight read_flight(const fs::path& file) {
  const InputFile input(file, refuse_as<UsageError>);
  if (input.size() < static_cast<int64_t>(flight_bytes)) {
    throw UsageError(fmt::format("{} is too short for a flight recorder's file: {} bytes instead of {}", file.string(),
                                 input.size(), flight_bytes));
  }
  const auto first = contents(input);
  const auto second = contents(input);
  const auto& header = *reinterpret_cast<const FlightHeader*>(first.data());
  if (std::memcmp(header.magic, flight_magic, sizeof flight_magic) != 0 ||
      header.record_bytes != sizeof(FlightRecord) || header.capacity != flight_capacity) {
    throw UsageError(fmt::format("{} is not a flight recorder's file of this version of shoal", file.string()));
  }
  Flight flight{.rank = header.rank,
                .size = header.size,
                .process = {header.pid, header.process_start},
                .host = text_of(header.host),
                .job = header.job,
                .epoch_ns = header.epoch_ns,
                .left = header.left,
                .failed = header.failed,
                .failure = printable(text_of(header.failure)),
                .groups = groups_of(header),
                .lacks_groups = header.groups_left_out > 0,
                .records = {},
                .state = {}};
  flight.records = records_of(first, second, flight.groups);
  check(flight, file);
  if (flight.host == host_identity()) flight.state = state_of(flight.process);
  return flight;
}

std::vector<Flight> read_flights(const std::vector<fs::path>& places) {
  std::vector<Flight> flights;
  for (const auto& place : places) {
    std::error_code error;
    if (!fs::is_directory(place, error)) {
      flights.push_back(read_flight(place));
      continue;
    }
    for (const auto& entry : fs::directory_iterator(place, error)) {
      if (entry.path().extension() == ".flight") flights.push_back(read_flight(entry.path()));
    }
    if (error) throw UsageError(fmt::format("cannot read folder {}: {}", place.string(), error.message()));
  }
  if (flights.empty()) {
    std::vector<std::string> names;
    for (const auto& place : places) names.push_back(place.string());
    throw UsageError(fmt::format("no flight recorder's file (rank-N.flight) in {}", fmt::join(names, ", ")));
  }
  const auto newest = std::max_element(flights.begin(), flights.end(), is_older)->job;
  std::erase_if(flights, [&](const Flight& flight) { return flight.job != newest; });
  const auto order = [](const Flight& flight) {
    return std::tuple(flight.rank, flight.host, flight.process.pid, flight.process.start_time);
  };
  std::sort(flights.begin(), flights.end(), [&](const Flight& a, const Flight& b) { return order(a) < order(b); });
  // A file may be given twice, by itself and with its folder.
  const auto same = [&](const Flight& a, const Flight& b) { return order(a) == order(b); };
  flights.erase(std::unique(flights.begin(), flights.end(), same), flights.end());
  return flights;
}

}  // namespace shoal
