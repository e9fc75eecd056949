#include "cli/telemetry/trace_merge.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iostream>
#include <limits>
#include <map>

#include "base/input_file.h"
#include "base/limits.h"
#include "base/strict_json.h"
#include "shoal/error.h"

namespace shoal::cli {
namespace {

namespace fs = std::filesystem;

// Limits of one event, and of everything in a trace beside its events.
constexpr JsonLimits event_limits{.depth = 16, .bytes = int64_t{16} << 20, .text_bytes = int64_t{1} << 20};
constexpr double longest_time = 1e18;  // microseconds: more than a clock counts

using EachEvent = std::function<void(nlohmann::json event)>;

// Passes the events to `each`; returns the rank.
int read_trace(const fs::path& file, const EachEvent& each) {
  const auto subject = file.string();
  size_t number = 0;
  const auto check = [&](nlohmann::json event) {
    const auto refuse = [&](const char* what) {
      throw UsageError(fmt::format("{}: traceEvents[{}]{}", subject, number, what));
    };
    if (!event.is_object()) refuse(" is not an object");
    const auto time = event.find("ts");
    if (time != event.end()) {
      if (!time->is_number()) refuse(".ts is not a number");
      if (!(std::abs(time->get<double>()) <= longest_time)) refuse(".ts is beyond all times");
    }
    each(std::move(event));
    ++number;
  };
  const auto trace = parse_strict(InputFile(file, refuse_as<UsageError>), event_limits, subject, refuse_as<UsageError>,
                                  {.name = "traceEvents", .each = check});
  const bool valid = trace.is_object() && trace.contains("traceEvents") && trace["traceEvents"].is_array() &&
                     trace.contains("shoal") && trace["shoal"].is_object() && trace["shoal"].contains("rank") &&
                     trace["shoal"]["rank"].is_number_integer();
  if (!valid) throw UsageError(fmt::format("{} is not a trace of one rank by shoal train --trace", subject));
  const auto& rank = trace["shoal"]["rank"];
  if (rank < 0 || rank >= max_ranks) {
    throw UsageError(fmt::format("{}: rank {}; ranks are 0 to {}", subject, rank.dump(), max_ranks - 1));
  }
  return rank.get<int>();
}

}  // namespace

std::vector<fs::path> trace_files(const std::vector<fs::path>& places) {
  std::vector<fs::path> files;
  for (const auto& place : places) {
    std::error_code error;
    if (!fs::is_directory(place, error)) {
      files.push_back(place);
      continue;
    }
    for (const auto& entry : fs::directory_iterator(place, error)) {
      const auto name = entry.path().filename().string();
      if (name.starts_with("rank-") && name.ends_with(".json")) files.push_back(entry.path());
    }
    if (error) throw UsageError(fmt::format("cannot read folder {}: {}", place.string(), error.message()));
  }
  if (files.empty()) throw UsageError("trace merge: no rank-N.json there");
  return files;
}

namespace {

int64_t write_merged(const std::map<int, fs::path>& by_rank, double first, std::ostream& out) {
  const char* between = "";
  int64_t events = 0;
  out << "{\"traceEvents\":[";
  for (const auto& [rank, file] : by_rank) {
    read_trace(file, [&](nlohmann::json event) {
      if (event.contains("ts")) event["ts"] = event["ts"].get<double>() - first;
      out << between << '\n' << event.dump();
      between = ",";
      ++events;
    });
  }
  out << "\n],\"displayTimeUnit\":\"ms\"}\n";
  return events;
}

}  // namespace

MergedTraces merge_traces(const std::vector<fs::path>& places, const std::string& target) {
  std::map<int, fs::path> by_rank;
  double first = std::numeric_limits<double>::infinity();
  for (const auto& file : trace_files(places)) {
    const int rank =
        read_trace(file, [&](const nlohmann::json& event) { first = std::min(first, event.value("ts", first)); });
    if (!by_rank.emplace(rank, file).second) {
      throw UsageError(fmt::format("trace merge: rank {} occurs twice, the second time in {}", rank, file.string()));
    }
    std::error_code none;
    if (fs::equivalent(file, target, none)) {
      throw UsageError(fmt::format("trace merge: {} is both input and output; give another output", file.string()));
    }
  }
  MergedTraces merged{.ranks = static_cast<int>(by_rank.size())};
  if (target == "-") {
    merged.events = write_merged(by_rank, first, std::cout);
    return merged;
  }
  std::ofstream out(target);
  if (out) merged.events = write_merged(by_rank, first, out);
  out.close();
  if (!out) throw UsageError(fmt::format("cannot write {}: {}", target, std::strerror(errno)));
  return merged;
}

}  // namespace shoal::cli
