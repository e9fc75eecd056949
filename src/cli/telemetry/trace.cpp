#include "cli/telemetry/trace.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <vector>

#include "cli/train/report.h"

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

// Spans of one thread nest and share its row; others are drawn as pairs of events on tracks of their own.
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

}  // namespace

void remove_traces(const std::string& folder) {
  std::error_code error;
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const auto name = entry.path().filename().string();
    int rank = 0, length = 0;
    const bool is_trace = std::sscanf(name.c_str(), "rank-%d.json%n", &rank, &length) == 1 &&  // NOLINT(cert-err34-c)
                          length == static_cast<int>(name.size());
    if (is_trace) files.push_back(entry.path());
  }
  for (const auto& file : files) fs::remove(file, error);
}

void write_trace(const std::string& folder, const Timeline& timeline, int rank, Clock::duration clock, size_t last) {
  std::error_code error;
  fs::create_directories(folder, error);  // if this fails, opening the file reports it
  Json events = Json::array();
  events.push_back(name_of("process_name", rank, 0, fmt::format("rank {}", rank)));
  std::map<std::thread::id, int> rows;
  size_t number = 0;
  const auto all = timeline.spans();
  const auto left_out = all.size() - std::min(all.size(), last);
  for (const auto& span : std::span(all).subspan(left_out)) {
    const auto [row, fresh] = rows.try_emplace(span.thread, static_cast<int>(rows.size()));
    if (fresh) events.push_back(name_of("thread_name", rank, row->second, fmt::format("thread {}", row->second)));
    add_span(events, span, rank, row->second, clock, number++);
  }
  const auto offset = std::chrono::duration_cast<std::chrono::nanoseconds>(clock).count();
  write_json(fmt::format("{}/rank-{}.json", folder, rank), {{"traceEvents", std::move(events)},
                                                            {"displayTimeUnit", "ms"},
                                                            {"shoal", {{"rank", rank}, {"clock_offset_ns", offset}}}});
}

}  // namespace shoal::cli
