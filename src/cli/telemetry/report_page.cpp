#include "cli/telemetry/report_page.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <set>

#include "base/print_to_stderr.h"
#include "base/printable.h"
#include "cli/bench/page.h"
#include "cli/bench/svg.h"
#include "cli/telemetry/run_files.h"
#include "comm/telemetry/verdict.h"
#include "shoal/error.h"

namespace shoal::cli {
namespace {

struct MetricsPlot {
  std::string title;
  std::string unit;
  std::vector<std::string> metrics;
};

// What belongs on one plot; every other metric has a plot of its own.
const std::vector<MetricsPlot>& known_plots() {
  static const std::vector<MetricsPlot> plots{
      {"Loss", "", {"loss", "eval_loss"}},
      {"Accuracy", "", {"accuracy", "eval_accuracy"}},
      {"Samples per second, all ranks", "", {"samples_per_second"}},
      {"Time of a step", " ms", {"step_ms", "wait_ms", "update_ms"}},
      {"Parts of a step", " ms", {"forward_ms", "backward_ms", "communication_ms", "overlap_ms"}},
      {"Learning rate", "", {"lr"}}};
  return plots;
}

std::vector<MetricsPlot> metrics_plots(const std::vector<RunReport>& runs) {
  auto plots = known_plots();
  std::set<std::string> placed{"seconds", "eval_count"};
  for (const auto& plot : plots) placed.insert(plot.metrics.begin(), plot.metrics.end());
  for (const auto& run : runs) {
    for (const auto& [name, unused] : run.series) {
      if (placed.insert(name).second) plots.push_back({name, "", {name}});
    }
  }
  return plots;
}

// The end of a long name, which is its most telling part.
std::string shortened(const std::string& name) {
  constexpr size_t most = 40;
  if (name.size() <= most) return name;
  auto begin = name.size() - most;
  while (begin < name.size() && (static_cast<unsigned char>(name[begin]) & 0xC0U) == 0x80U) ++begin;
  return "…" + name.substr(begin);
}

// Steps that a plot cannot show; empty: there are none.
std::string beyond_in_words(const RunReport& run, const std::string& metric, const Series& series) {
  if (series.beyond() == 0) return "";
  return fmt::format("<p class=\"note\">Values of {} that are NaN or beyond 1e100 in {}: {}, the first in step {}.</p>",
                     escaped(metric), escaped(run.name), series.beyond(), series.first_beyond());
}

std::string drawn_metrics(const MetricsPlot& plot, const std::vector<RunReport>& runs) {
  std::vector<Line> lines;
  std::string beyond;
  int64_t per_point = 1;
  for (const auto& run : runs) {
    for (const auto& metric : plot.metrics) {
      const auto found = run.series.find(metric);
      if (found == run.series.end()) continue;
      beyond += beyond_in_words(run, metric, found->second);
      if (found->second.count() == 0) continue;
      auto name = runs.size() == 1           ? shortened(metric)
                  : plot.metrics.size() == 1 ? shortened(run.name)
                                             : shortened(run.name) + ": " + shortened(metric);
      lines.push_back({{name, static_cast<int>(lines.size())}, found->second.points()});
      per_point = std::max(per_point, found->second.values_per_point());
    }
  }
  if (lines.empty() && beyond.empty()) return "";
  auto html = fmt::format("<h2>{}</h2>", escaped(plot.title)) + beyond;
  if (per_point > 1) html += fmt::format("<p class=\"note\">Each point is the mean of up to {} steps.</p>", per_point);
  return lines.empty() ? html : html + curve_plot(plot.title, plot.unit, lines);
}

std::string table_row(const char* tag, const std::vector<std::string>& words, const std::vector<std::string>& numbers) {
  std::string html = "<tr>";
  for (const auto& cell : words) html += fmt::format("<{0} class=\"words\">{1}</{0}>", tag, escaped(cell));
  for (const auto& cell : numbers) html += fmt::format("<{0}>{1}</{0}>", tag, escaped(cell));
  return html + "</tr>\n";
}

std::string framed_table(const std::string& head, const std::string& body) {
  return fmt::format("<div class=\"wide\"><table><thead>{}</thead><tbody>{}</tbody></table></div>", head, body);
}

std::string figures_section(const std::vector<RunReport>& runs) {
  std::string body;
  for (const auto& run : runs) {
    for (const auto& [name, series] : run.series) {
      const auto value = [&series = series](double number) {
        return series.count() > 0 ? fmt::format("{:.6g}", number) : "–";
      };
      body +=
          table_row("td", {run.name, name},
                    {std::isnan(series.last()) ? "NaN" : fmt::format("{:.6g}", series.last()), value(series.least()),
                     value(series.most()), std::to_string(series.count()), std::to_string(series.beyond())});
    }
  }
  return "<h2>All figures</h2>" +
         framed_table(table_row("th", {"run", "metric"}, {"last", "least", "most", "values", "NaN or beyond 1e100"}),
                      body);
}

// Such as the ends of ranks in an elastic job.
std::string events_section(const RunReport& run) {
  if (run.events.empty()) return "";
  auto html = fmt::format("<h2>Events of {}</h2>", escaped(run.name));
  const auto shown = static_cast<int64_t>(run.events.size());
  if (run.event_count > shown) {
    html += fmt::format("<p class=\"note\">The last {} of {}.</p>", shown, run.event_count);
  }
  std::string body;
  for (const auto& event : run.events) body += table_row("td", {std::to_string(event.step), event.event}, {});
  return html + framed_table(table_row("th", {"after step", "event"}, {}), body);
}

std::string ranks_section(const RunReport& run) {
  if (run.ranks.empty()) return "";
  auto html = fmt::format("<h2>Ranks of {}</h2>", escaped(run.name));
  for (const auto& sentence : run.verdict) html += fmt::format("<p class=\"note\">{}</p>", escaped(sentence));
  std::string body;
  for (const auto& rank : run.ranks) {
    body += table_row(
        "td", {std::to_string(rank.rank), rank.state, rank.operation},
        {rank.step < 0 ? "–" : std::to_string(rank.step), rank.late_ms ? fmt::format("{:.2f}", *rank.late_ms) : "–"});
  }
  return html + framed_table(table_row("th", {"rank", "state", "last operation"}, {"step", "late ms"}), body);
}

}  // namespace

std::vector<RunReport> read_runs(const std::string& place) {
  const auto files = find_run(place);
  std::vector<RunReport> runs;
  const auto add = [&](const std::string& name, const std::optional<std::filesystem::path>& metrics) {
    auto& run = runs.emplace_back(RunReport{.name = printable(name)});
    if (!metrics) return;
    auto read = read_series(*metrics);
    run.series = std::move(read.by_name);
    run.damaged = std::move(read.damaged);
    run.events = std::move(read.events);
    run.event_count = read.event_count;
  };
  std::exception_ptr no_metrics;
  const auto add_if_metrics = [&](const std::filesystem::path& file) {
    try {
      add(file, file);
    } catch (const UsageError& error) {
      no_metrics = std::current_exception();
      runs.pop_back();
      print_to_stderr("shoal: {}: the file is left out\n", error.what());
    }
  };
  if (files.older.empty()) {
    add(place, files.metrics);
  } else {
    for (const auto& metrics : files.older) add_if_metrics(metrics);
    add_if_metrics(*files.metrics);
    if (runs.empty()) std::rethrow_exception(no_metrics);
  }
  if (files.flights.empty()) return runs;
  const auto flights = read_flights(files.flights);
  runs.back().ranks = rank_views(flights);
  runs.back().verdict = verdict(flights);
  return runs;
}

std::string report_page(const std::vector<RunReport>& runs) {
  std::string body;
  for (const auto& run : runs) {
    if (run.damaged.count > 0) body += fmt::format("<p class=\"note\">{}</p>", escaped(run.damaged.in_words()));
  }
  for (const auto& run : runs) body += events_section(run);
  for (const auto& plot : metrics_plots(runs)) body += drawn_metrics(plot, runs);
  body += figures_section(runs);
  for (const auto& run : runs) body += ranks_section(run);
  std::vector<std::string> names;
  for (const auto& run : runs) names.push_back(run.name);
  return html_page("shoal report", fmt::format("{}", fmt::join(names, ", ")), body);
}

nlohmann::ordered_json to_json(const std::vector<RunReport>& runs) {
  auto list = nlohmann::ordered_json::array();
  for (const auto& run : runs) {
    nlohmann::ordered_json json{{"run", run.name}, {"metrics", nlohmann::ordered_json::object()}};
    for (const auto& [name, series] : run.series) {
      auto& metric = json["metrics"][name];
      metric = {{"count", series.count()}, {"beyond", series.beyond()}, {"last", series.last()}};
      for (const auto& [extreme, value] : {std::pair("least", series.least()), std::pair("most", series.most())})
        metric[extreme] = series.count() > 0 ? nlohmann::ordered_json(value) : nullptr;
      metric["values_per_point"] = series.values_per_point();
      metric["points"] = series.points();
    }
    if (run.damaged.count > 0) json["damaged_lines"] = {{"count", run.damaged.count}, {"first", run.damaged.first}};
    for (const auto& event : run.events) json["events"].push_back(to_json(event));
    if (!run.verdict.empty()) json["verdict"] = run.verdict;
    list.push_back(std::move(json));
  }
  return {{"runs", list}};
}

}  // namespace shoal::cli
