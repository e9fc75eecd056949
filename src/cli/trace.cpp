#include "cli/trace.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "cli/report.h"
#include "shoal/base/error.h"

namespace shoal::cli {
namespace {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

double microseconds(Clock::duration duration) {
  return std::chrono::duration<double, std::micro>(duration).count();
}

Json name_of(const char* what, int rank, int row, const std::string& name) {
  return {{"ph", "M"}, {"name", what}, {"pid", rank}, {"tid", row}, {"args", {{"name", name}}}};
}

// Spans of one thread nest, so that they share its row; others are drawn as pairs of events, on tracks of their own.
void add_span(Json& events, const Span& span, int rank, int row, Clock::duration clock, size_t number) {
  Json event = {{"ph", "X"},   {"cat", span.category}, {"name", span.name},
                {"pid", rank}, {"tid", row},           {"ts", microseconds(span.begin.time_since_epoch() + clock)}};
  Json arguments = Json::object();
  if (span.label.step >= 0) arguments["step"] = span.label.step;
  if (!span.group.empty()) {
    arguments.update(
        {{"group", span.group}, {"bytes", span.bytes}, {"bucket", span.label.bucket}, {"what", span.label.what}});
  }
  event["args"] = arguments;
  if (span.category == "unit") {
    event["ph"] = "i";
    event["s"] = "t";
  } else if (span.category == "collective" || span.category == "exchange") {
    event["ph"] = "b";
    event["id"] = fmt::format("{}.{}", rank, number);
    Json end = event;
    end["ph"] = "e";
    end["ts"] = microseconds(span.end.time_since_epoch() + clock);
    end.erase("args");
    events.push_back(std::move(event));
    events.push_back(std::move(end));
    return;
  } else {
    event["dur"] = microseconds(span.end - span.begin);
  }
  events.push_back(std::move(event));
}

Json read_trace(const fs::path& file) {
  std::ifstream in(file);
  auto trace = Json::parse(in, nullptr, /*allow_exceptions=*/false);
  const bool valid = trace.is_object() && trace.contains("traceEvents") && trace["traceEvents"].is_array() &&
                     trace.contains("shoal") && trace["shoal"].is_object() && trace["shoal"].contains("rank") &&
                     trace["shoal"]["rank"].is_number_integer();
  if (!valid) throw UsageError(fmt::format("{} is not a trace of one rank by shoal train --trace", file.string()));
  return trace;
}

std::vector<fs::path> files_in(const std::vector<fs::path>& places) {
  std::vector<fs::path> files;
  for (const auto& place : places) {
    if (!fs::is_directory(place)) {
      files.push_back(place);
      continue;
    }
    for (const auto& entry : fs::directory_iterator(place)) {
      const auto name = entry.path().filename().string();
      if (name.starts_with("rank-") && name.ends_with(".json")) files.push_back(entry.path());
    }
  }
  if (files.empty()) throw UsageError("trace merge: no rank-N.json there");
  return files;
}

}  // namespace

void write_trace(const std::string& folder, const Timeline& timeline, int rank, Clock::duration clock) {
  std::error_code error;
  fs::create_directories(folder, error);  // if it fails, the file says so
  Json events = Json::array();
  events.push_back(name_of("process_name", rank, 0, fmt::format("rank {}", rank)));
  std::map<std::thread::id, int> rows;
  size_t number = 0;
  for (const auto& span : timeline.spans()) {
    const auto [row, fresh] = rows.try_emplace(span.thread, static_cast<int>(rows.size()));
    if (fresh) events.push_back(name_of("thread_name", rank, row->second, fmt::format("thread {}", row->second)));
    add_span(events, span, rank, row->second, clock, number++);
  }
  const auto offset = std::chrono::duration_cast<std::chrono::nanoseconds>(clock).count();
  write_json(fmt::format("{}/rank-{}.json", folder, rank), {{"traceEvents", std::move(events)},
                                                            {"displayTimeUnit", "ms"},
                                                            {"shoal", {{"rank", rank}, {"clock_offset_ns", offset}}}});
}

void merge_traces(const std::vector<fs::path>& places, const std::string& target) {
  std::map<int, Json> by_rank;
  for (const auto& file : files_in(places)) {
    auto trace = read_trace(file);
    const int rank = trace["shoal"]["rank"];
    if (!by_rank.emplace(rank, std::move(trace["traceEvents"])).second) {
      throw UsageError(fmt::format("trace merge: rank {} comes twice, the second time in {}", rank, file.string()));
    }
  }
  double first = std::numeric_limits<double>::infinity();
  for (const auto& [rank, events] : by_rank) {
    for (const auto& event : events) first = std::min(first, event.value("ts", first));
  }
  Json all = Json::array();
  for (auto& [rank, events] : by_rank) {
    for (auto& event : events) {
      if (event.contains("ts")) event["ts"] = event["ts"].get<double>() - first;
      all.push_back(std::move(event));
    }
  }
  write_json(target, {{"traceEvents", std::move(all)}, {"displayTimeUnit", "ms"}});
}

}  // namespace shoal::cli
