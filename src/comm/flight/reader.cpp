#include "comm/flight/reader.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>

#include "base/printable.h"
#include "shoal/base/error.h"

namespace shoal {
namespace {

namespace fs = std::filesystem;

std::vector<char> contents(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  std::vector<char> bytes(flight_bytes);
  in.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (static_cast<uint64_t>(in.gcount()) != flight_bytes) {
    throw UsageError(
        fmt::format("{} cannot be read as a flight recorder's file: it is missing or too short", file.string()));
  }
  return bytes;
}

template <size_t room>
std::string text_of(const char (&text)[room]) {
  return {text, strnlen(text, room)};
}

std::vector<Flight::Members> groups_of(const FlightHeader& header) {
  std::vector<Flight::Members> list;
  std::istringstream lines(std::string(header.groups, std::min(header.group_bytes.load(), flight_group_bytes)));
  for (std::string line; std::getline(lines, line);) {
    auto& group = list.emplace_back();
    group.name = line.substr(0, line.find('\t'));
    std::istringstream numbers(line.substr(std::min(line.size(), group.name.size() + 1)));
    for (std::string number; std::getline(numbers, number, ',');)
      group.world_ranks.push_back(std::atoi(number.c_str()));
  }
  return list;
}

// A record that was being written while the file was read has another ticket in a second reading.
std::vector<Flight::Record> records_of(const std::vector<char>& first, const std::vector<char>& second, int groups) {
  const auto record = [](const std::vector<char>& bytes, uint64_t index) {
    return reinterpret_cast<const FlightRecord*>(bytes.data() + sizeof(FlightHeader)) + index;
  };
  std::map<uint64_t, Flight::Record> by_ticket;
  for (uint64_t i = 0; i < flight_capacity; ++i) {
    const auto& found = *record(first, i);
    if (found.ticket == 0 || found.ticket != record(second, i)->ticket) continue;
    auto print = found.print;
    print.text[text_bytes - 1] = 0;
    by_ticket[found.ticket] = {.kind = static_cast<FlightRecord::Kind>(found.kind),
                               .group = found.group < groups ? found.group : -1,
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

}  // namespace

Flight read_flight(const fs::path& file) {
  const auto first = contents(file);
  const auto second = contents(file);
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
                .records = {},
                .state = {}};
  flight.records = records_of(first, second, static_cast<int>(flight.groups.size()));
  if (flight.host == host_identity()) flight.state = state_of(flight.process);
  return flight;
}

std::vector<Flight> read_flights(const std::vector<fs::path>& places) {
  std::vector<Flight> flights;
  for (const auto& place : places) {
    if (!fs::is_directory(place)) {
      flights.push_back(read_flight(place));
      continue;
    }
    for (const auto& entry : fs::directory_iterator(place)) {
      if (entry.path().extension() == ".flight") flights.push_back(read_flight(entry.path()));
    }
  }
  if (flights.empty()) {
    std::vector<std::string> names;
    for (const auto& place : places) names.push_back(place.string());
    throw UsageError(fmt::format("no flight recorder's file (rank-N.flight) in {}", fmt::join(names, ", ")));
  }
  const auto newest = std::max_element(flights.begin(), flights.end(), [](const Flight& a, const Flight& b) {
                        return a.epoch_ns + (a.records.empty() ? 0 : a.records.back().entered) <
                               b.epoch_ns + (b.records.empty() ? 0 : b.records.back().entered);
                      })->job;
  std::erase_if(flights, [&](const Flight& flight) { return flight.job != newest; });
  std::sort(flights.begin(), flights.end(), [](const Flight& a, const Flight& b) { return a.rank < b.rank; });
  return flights;
}

}  // namespace shoal
