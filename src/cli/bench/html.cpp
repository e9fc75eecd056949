#include "cli/bench/html.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <map>
#include <vector>

#include "cli/bench/page.h"
#include "cli/bench/samples.h"
#include "cli/bench/svg.h"
#include "cli/bench/table.h"

namespace shoal::cli {
namespace {

using Json = nlohmann::ordered_json;

struct Column {
  std::string title;
  bool words;  // left-aligned
  std::function<std::string(const Json&)> cell;
};

Column words(const char* title, const char* key) {
  return {title, true, [key](const Json& figure) { return figure[key].get<std::string>(); }};
}

std::string number(const Json& value, const char* format) {
  return value.is_null() ? "–" : fmt::format(fmt::runtime(format), value.get<double>());
}

// path: keys from the figure down. A value that is absent or null is shown as a dash.
Column numbers(const char* title, const char* path, const char* format) {
  return {title, false, [pointer = Json::json_pointer(path), format](const Json& figure) {
            return number(figure.contains(pointer) ? figure[pointer] : Json(), format);
          }};
}

std::string table(const std::vector<Column>& columns, const Json& figures) {
  std::string html = "<h2>All figures</h2><div class=\"wide\"><table><thead><tr>";
  const auto add = [&](const char* tag, const Column& column, const std::string& content) {
    html += fmt::format("<{0}{1}>{2}</{0}>", tag, column.words ? " class=\"words\"" : "", escaped(content));
  };
  for (const auto& column : columns) add("th", column, column.title);
  html += "</tr></thead><tbody>";
  for (const auto& figure : figures) {
    html += "<tr>";
    for (const auto& column : columns) add("td", column, column.cell(figure));
    html += "</tr>\n";
  }
  return html + "</tbody></table></div>";
}

// Gives a transport and a kind of memory the same colour in all plots.
class Colours {
 public:
  Named operator()(const std::string& name) {
    return {name, numbers_.try_emplace(name, static_cast<int>(numbers_.size())).first->second};
  }

 private:
  std::map<std::string, int> numbers_;
};

struct Plot {
  std::string title;
  std::vector<Line> lines;
  Line copy{{"one copy (memcpy)", undivided}, {}};
};

// One plot for each operation and dtype, in the order of the figures.
std::vector<Plot> plots_of(const Json& figures) {
  constexpr double shortest = 0.01;      // a logarithmic axis has no zero
  constexpr double least_copied = 4096;  // smaller copies say nothing about memory
  std::vector<Plot> plots;
  Colours colours;
  for (const auto& figure : figures) {
    const bool moves = figure["bytes"] > 0;  // false for a barrier
    const auto title = fmt::format("{}{}, {} ranks", figure["op"].get<std::string>(),
                                   moves ? ", " + figure["dtype"].get<std::string>() : "", figure["ranks"].get<int>());
    auto plot = std::find_if(plots.begin(), plots.end(), [&](const Plot& other) { return other.title == title; });
    if (plot == plots.end()) plot = plots.insert(plots.end(), Plot{title, {}});
    const std::string transport = figure["transport"];
    const auto name =
        colours(moves ? fmt::format("{}, {}", transport, figure["buffers"].get<std::string>()) : transport);
    auto& lines = plot->lines;
    auto line =
        std::find_if(lines.begin(), lines.end(), [&](const Line& other) { return other.name.name == name.name; });
    if (line == lines.end()) line = lines.insert(lines.end(), Line{name, {}});
    const double bytes = figure["bytes"];
    line->points.emplace_back(bytes, std::max(shortest, figure["median_us"].get<double>()));
    auto& copy = plot->copy.points;
    const bool is_new = copy.empty() || copy.back().first != bytes;
    if (is_new && bytes >= least_copied && figure.contains("memcpy_us")) {
      copy.emplace_back(bytes, std::max(shortest, figure["memcpy_us"].get<double>()));
    }
  }
  for (auto& plot : plots) {
    if (!plot.copy.points.empty()) plot.lines.push_back(plot.copy);
    for (auto& line : plot.lines) std::sort(line.points.begin(), line.points.end());
  }
  return plots;
}

// Plots times over sizes; for a single size, bars instead of lines.
std::string drawn(const Plot& plot) {
  const auto title = plot.title + ": median time";
  const bool one_size =
      std::all_of(plot.lines.begin(), plot.lines.end(), [](const Line& line) { return line.points.size() == 1; });
  if (!one_size) return line_plot(title + " by size", plot.lines);
  std::vector<Bar> bars;
  for (const auto& line : plot.lines) bars.push_back({line.name.name, {line.points[0].second}});
  return bar_plot(title, "µs", {{"median"}}, bars);
}

std::string collectives_section(const Json& figures) {
  std::string html =
      "<p class=\"note\">Median over rounds of the slowest rank's time; all of a round's figures were measured one "
      "after the other. Both axes are logarithmic, lower is better. A copy of the same bytes by one core is what the "
      "memory allows.</p>";
  for (const auto& plot : plots_of(figures)) html += fmt::format("<h2>{}</h2>{}", escaped(plot.title), drawn(plot));
  std::vector<Column> columns{words("operation", "op"),
                              words("dtype", "dtype"),
                              {"size", false, [](const Json& figure) { return format_bytes(figure["bytes"]); }},
                              words("over", "transport"),
                              words("memory", "buffers"),
                              numbers("min µs", "/min_us", "{:.1f}"),
                              numbers("median µs", "/median_us", "{:.1f}"),
                              numbers("max µs", "/max_us", "{:.1f}"),
                              numbers("copy µs", "/memcpy_us", "{:.1f}")};
  for (const auto& transport : compared_with(figures)) {
    columns.push_back({"× " + transport, false, [&figures, transport](const Json& figure) {
                         return number(times_faster(figures, figure, transport), "{:.2f}");
                       }});
  }
  columns.push_back(numbers("bytes over TCP", "/wire_bytes", "{:.0f}"));
  return html + table(columns, figures);
}

double or_zero(const Json& value) {
  return value.is_null() ? 0 : std::max(0.0, value.get<double>());
}

std::string maker_of(const Json& figure) {
  return figure["peer"] == "shoal" ? "shoal" : "python";
}

// Bar of the known parts, followed by the rest of the whole.
Bar divided(const std::string& name, const Json& whole, const std::vector<Json>& known) {
  Bar bar{name, {}};
  double rest = or_zero(whole);
  for (const auto& part : known) {
    bar.parts.push_back(or_zero(part));
    rest -= bar.parts.back();
  }
  bar.parts.push_back(std::max(0.0, rest));
  return bar;
}

std::string training_section(const Json& figures) {
  std::vector<Bar> times;
  std::vector<Bar> memory;
  std::vector<Bar> wire;
  for (const auto& figure : figures) {
    const std::string transport = figure["transport"];
    const auto name = fmt::format("{} {}{}", maker_of(figure), figure["strategy"].get<std::string>(),
                                  transport == "none" ? "" : " over " + transport);
    const auto& use = figure["memory"];
    times.push_back(divided(name, figure["step_ms"]["median"],
                            {figure["compute_ms"], figure["exposed_comm_ms"], figure["update_ms"]}));
    memory.push_back(divided(name, use["growth"], {use["params"], use["grads"], use["state"]}));
    if (!figure["wire_bytes_per_step"].is_null()) {
      wire.push_back({name, {or_zero(figure["wire_bytes_per_step"]) / (1 << 20)}});
    }
  }
  const auto& first = figures.front();
  std::string html =
      fmt::format("<p class=\"note\">{} {}, {} ranks, {}, {}. All of a round's runs came one after the other.</p>",
                  escaped(first["model"]), escaped(first["size"]), first["ranks"].get<int>(), escaped(first["dtype"]),
                  escaped(first["optimizer"]));
  html += "<h2>Step time</h2><p class=\"note\">Medians. Peers in Python do not say how their step divides.</p>" +
          bar_plot("Step time", "ms",
                   {{"compute", 0}, {"waiting for communication", 1}, {"update", 2}, {"other", undivided}}, times);
  html +=
      "<h2>Memory per rank</h2><p class=\"note\">Growth of resident memory since before the model was built, and what "
      "of it is known.</p>" +
      bar_plot("Memory per rank", "MiB",
               {{"parameters", 0}, {"gradients", 1}, {"optimizer state", 2}, {"other", undivided}}, memory);
  html += "<h2>Bytes over TCP per step</h2><p class=\"note\">Of all ranks together; Python's peers are not asked.</p>" +
          bar_plot("Bytes over TCP per step", "MiB", {{"bytes", 0}}, wire);
  return html + table({{"by", true, maker_of},
                       words("strategy", "strategy"),
                       words("over", "transport"),
                       numbers("step ms", "/step_ms/median", "{:.3f}"),
                       numbers("min", "/step_ms/min", "{:.3f}"),
                       numbers("max", "/step_ms/max", "{:.3f}"),
                       numbers("compute", "/compute_ms", "{:.3f}"),
                       numbers("waiting", "/exposed_comm_ms", "{:.3f}"),
                       numbers("update", "/update_ms", "{:.3f}"),
                       numbers("× local", "/ratio_to_local", "{:.3f}"),
                       numbers("collectives", "/collectives_per_step", "{:.1f}"),
                       numbers("growth MiB", "/memory/growth", "{:.1f}"),
                       numbers("PSS MiB", "/memory/pss", "{:.1f}"),
                       numbers("bytes over TCP", "/wire_bytes_per_step", "{:.0f}")},
                      figures);
}

}  // namespace

std::string html_report(const Json& report) {
  const auto& machine = report["machine"];
  const auto facts = fmt::format("{}, {} cores, {} GiB, {}; shoal {}, libtorch {}; load of the last minute {:.2f}",
                                 machine["processor"].get<std::string>(), machine["cores"].get<int>(),
                                 machine["memory_gib"].get<double>(), machine["system"].get<std::string>(),
                                 report["versions"]["shoal"].get<std::string>(),
                                 report["versions"]["libtorch"].get<std::string>(), report["load_1min"].get<double>());
  std::string body;
  if (report.contains("collectives")) body += collectives_section(report["collectives"]);
  if (report.contains("train")) body += training_section(report["train"]);
  return html_page("shoal bench", facts, body);
}

}  // namespace shoal::cli
