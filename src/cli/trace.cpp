#include "cli/trace.h"

#include <fmt/format.h>

#include <map>
#include <nlohmann/json.hpp>

#include "cli/report.h"

namespace shoal::cli {

void write_trace(const std::string& path, const CallLog& log, int rank) {
  using Json = nlohmann::ordered_json;
  const auto microseconds = [](Clock::duration duration) {
    return std::chrono::duration<double, std::micro>(duration).count();
  };
  std::map<std::string, int> rows;
  Json events = Json::array();
  events.push_back(
      {{"ph", "M"}, {"name", "process_name"}, {"pid", rank}, {"args", {{"name", fmt::format("rank {}", rank)}}}});
  for (const auto& record : log.records()) {
    const auto [row, fresh] = rows.try_emplace(record.group, static_cast<int>(rows.size()));
    if (fresh) {
      events.push_back({{"ph", "M"},
                        {"name", "thread_name"},
                        {"pid", rank},
                        {"tid", row->second},
                        {"args", {{"name", "group " + record.group}}}});
    }
    events.push_back({{"ph", "X"},
                      {"cat", "collective"},
                      {"name", to_string(record.op)},
                      {"pid", rank},
                      {"tid", row->second},
                      {"ts", microseconds(record.issued.time_since_epoch())},
                      {"dur", microseconds(record.finished - record.issued)},
                      {"args",
                       {{"bytes", record.bytes},
                        {"step", record.label.step},
                        {"bucket", record.label.bucket},
                        {"what", record.label.what}}}});
  }
  write_json(path, {{"traceEvents", events}, {"displayTimeUnit", "ms"}});
}

}  // namespace shoal::cli
