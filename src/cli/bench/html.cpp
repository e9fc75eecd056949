#include "cli/bench/html.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <vector>

#include "cli/bench/samples.h"

namespace shoal::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* style =
    "body{font:15px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 "
    "1rem;color:#1b1f24;background:#fff}"
    "h1{font-size:1.6rem}h2{font-size:1.2rem;margin-top:2.2rem}table{border-collapse:collapse;font-size:13px;width:100%"
    "}"
    "th,td{padding:.25rem .6rem;border-bottom:1px solid #d8dee4;text-align:right;white-space:nowrap}"
    "th:first-child,td:first-child{text-align:left}svg{max-width:100%;height:auto}text{font:12px system-ui,sans-serif;"
    "fill:#1b1f24}.note{color:#57606a}";
// Distinguishable with any colour vision (Okabe and Ito).
constexpr std::array<const char*, 6> colours{"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"};

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '&':
        result += "&amp;";
        break;
      case '"':
        result += "&quot;";
        break;
      default:
        result += c;
    }
  }
  return result;
}

std::string cell(const Json& value, const char* format) {
  return value.is_null() ? "-" : fmt::format(fmt::runtime(format), value.get<double>());
}

struct Line {
  std::string name;
  std::vector<std::pair<double, double>> points;
};

// Both axes logarithmic, with a grid line per power of ten in y and of four in x.
std::string line_plot(const std::vector<Line>& lines, const std::string& title) {
  constexpr double width = 720, height = 300, left = 70, top = 20, plot_width = 480, plot_height = 230;
  double x0 = INFINITY, x1 = 0, y0 = INFINITY, y1 = 0;
  for (const auto& line : lines) {
    for (const auto& [x, y] : line.points) {
      x0 = std::min(x0, x);
      x1 = std::max(x1, x);
      y0 = std::min(y0, y);
      y1 = std::max(y1, y);
    }
  }
  y0 = std::pow(10, std::floor(std::log10(y0)));
  y1 = std::pow(10, std::ceil(std::log10(y1)));
  const auto at_x = [&](double x) {
    return left + (x1 > x0 ? std::log(x / x0) / std::log(x1 / x0) : 0.5) * plot_width;
  };
  const auto at_y = [&](double y) {
    return top + plot_height * (1 - (y1 > y0 ? std::log(y / y0) / std::log(y1 / y0) : 0.5));
  };
  std::string svg =
      fmt::format("<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">", width, height, escaped(title));
  for (double y = y0; y <= y1 * 1.001; y *= 10) {
    svg += fmt::format("<line x1=\"{0}\" x2=\"{1}\" y1=\"{2:.1f}\" y2=\"{2:.1f}\" stroke=\"#d8dee4\"/>", left,
                       left + plot_width, at_y(y));
    svg += fmt::format("<text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{:g} us</text>", left - 6, at_y(y) + 4, y);
  }
  std::map<double, bool> sizes;
  for (const auto& line : lines) {
    for (const auto& [x, y] : line.points) sizes[x] = true;
  }
  for (const auto& [x, present] : sizes) {
    svg += fmt::format("<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{}</text>", at_x(x), top + plot_height + 18,
                       format_bytes(static_cast<int64_t>(x)));
  }
  for (size_t i = 0; i < lines.size(); ++i) {
    const auto* colour = colours[i % colours.size()];
    std::string path;
    for (const auto& [x, y] : lines[i].points) path += fmt::format("{:.1f},{:.1f} ", at_x(x), at_y(y));
    svg += fmt::format("<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\"/>", path, colour);
    for (const auto& [x, y] : lines[i].points) {
      svg += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\" fill=\"{}\"/>", at_x(x), at_y(y), colour);
    }
    const double y = top + 14 + 18.0 * static_cast<double>(i);
    svg += fmt::format("<rect x=\"{}\" y=\"{}\" width=\"12\" height=\"12\" fill=\"{}\"/>", left + plot_width + 20,
                       y - 10, colour);
    svg += fmt::format("<text x=\"{}\" y=\"{}\">{}</text>", left + plot_width + 38, y, escaped(lines[i].name));
  }
  return svg + "</svg>";
}

std::string collectives_section(const Json& figures) {
  // One plot per operation and dtype: median over size, a line per transport and memory, and the copy.
  std::map<std::string, std::vector<Line>> plots;
  std::map<std::string, Line> copies;
  for (const auto& figure : figures) {
    const auto plot = fmt::format("{}, {}, {} ranks", std::string(figure["op"]), std::string(figure["dtype"]),
                                  figure["ranks"].get<int>());
    const auto name = fmt::format("{}, {}", std::string(figure["transport"]), std::string(figure["buffers"]));
    auto& lines = plots[plot];
    auto line = std::find_if(lines.begin(), lines.end(), [&](const Line& other) { return other.name == name; });
    if (line == lines.end()) line = lines.insert(lines.end(), Line{name, {}});
    line->points.emplace_back(figure["bytes"].get<double>(), std::max(0.01, figure["median_us"].get<double>()));
    if (figure.contains("memcpy_us") && figure["transport"] == "host" && figure["buffers"] == "shared") {
      copies[plot].points.emplace_back(figure["bytes"].get<double>(),
                                       std::max(0.01, figure["memcpy_us"].get<double>()));
    }
  }
  std::string html;
  for (auto& [title, lines] : plots) {
    if (copies.count(title) > 0) lines.push_back({"one copy (memcpy)", copies[title].points});
    html += fmt::format("<h2>{}</h2>{}", escaped(title), line_plot(lines, title + ": median microseconds by size"));
  }
  html +=
      "<h2>All figures</h2><table><tr><th>operation</th><th>dtype</th><th>size</th><th>over</th><th>memory</th>"
      "<th>min us</th><th>median us</th><th>max us</th><th>copy us</th><th>wire bytes</th></tr>";
  for (const auto& figure : figures) {
    html += fmt::format(
        "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td>"
        "<td>{}</td><td>{}</td></tr>",
        std::string(figure["op"]), std::string(figure["dtype"]), format_bytes(figure["bytes"]),
        std::string(figure["transport"]), std::string(figure["buffers"]), cell(figure["min_us"], "{:.1f}"),
        cell(figure["median_us"], "{:.1f}"), cell(figure["max_us"], "{:.1f}"),
        cell(figure.value("memcpy_us", Json()), "{:.1f}"), cell(figure["wire_bytes"], "{:.0f}"));
  }
  return html + "</table>";
}

struct Bar {
  std::string name;
  std::vector<double> parts;
};

std::string bar_plot(const std::vector<Bar>& bars, const std::vector<std::string>& parts, const std::string& unit) {
  constexpr double left = 210, plot_width = 400, row = 30, top = 30;
  const double height = top + row * static_cast<double>(bars.size()) + 10;
  double most = 1e-9;
  for (const auto& bar : bars) {
    double total = 0;
    for (const double part : bar.parts) total += part;
    most = std::max(most, total);
  }
  std::string svg = fmt::format("<svg viewBox=\"0 0 720 {}\" role=\"img\" aria-label=\"{}\">", height, escaped(unit));
  for (size_t i = 0; i < parts.size(); ++i) {
    const double x = left + 150.0 * static_cast<double>(i);
    svg +=
        fmt::format("<rect x=\"{}\" y=\"4\" width=\"12\" height=\"12\" fill=\"{}\"/><text x=\"{}\" y=\"14\">{}</text>",
                    x, colours[i % colours.size()], x + 18, escaped(parts[i]));
  }
  for (size_t i = 0; i < bars.size(); ++i) {
    const double y = top + row * static_cast<double>(i);
    double x = left;
    double total = 0;
    svg +=
        fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>", left - 8, y + 15, escaped(bars[i].name));
    for (size_t part = 0; part < bars[i].parts.size(); ++part) {
      const double length = bars[i].parts[part] / most * plot_width;
      svg += fmt::format("<rect x=\"{:.1f}\" y=\"{}\" width=\"{:.1f}\" height=\"20\" fill=\"{}\"/>", x, y, length,
                         colours[part % colours.size()]);
      x += length;
      total += bars[i].parts[part];
    }
    svg += fmt::format("<text x=\"{:.1f}\" y=\"{}\">{:.4g} {}</text>", x + 6, y + 15, total, escaped(unit));
  }
  return svg + "</svg>";
}

double or_zero(const Json& value) {
  return value.is_null() ? 0 : std::max(0.0, value.get<double>());
}

std::string training_section(const Json& figures) {
  std::vector<Bar> times;
  std::vector<Bar> memory;
  std::vector<Bar> wire;
  for (const auto& figure : figures) {
    const auto name = fmt::format("{} {} over {}", figure["peer"] == "shoal" ? "shoal" : "python",
                                  std::string(figure["strategy"]), std::string(figure["transport"]));
    const double step = figure["step_ms"]["median"];
    const double exposed = or_zero(figure["exposed_comm_ms"]);
    const double update = or_zero(figure["update_ms"]);
    times.push_back({name, {std::max(0.0, step - exposed - update), exposed, update}});
    memory.push_back({name, {or_zero(figure["memory"]["growth"])}});
    wire.push_back({name, {or_zero(figure["wire_bytes_per_step"]) / (1 << 20)}});
  }
  std::string html =
      "<h2>Step time</h2><p class=\"note\">Median. Peers in Python do not say how their step divides.</p>" +
      bar_plot(times, {"compute", "waiting", "update"}, "ms");
  html += "<h2>Memory per rank</h2><p class=\"note\">Growth of resident memory since before the model was built.</p>" +
          bar_plot(memory, {"growth"}, "MiB");
  html += "<h2>Bytes over TCP per step, all ranks</h2>" + bar_plot(wire, {"bytes"}, "MiB");
  html +=
      "<h2>All figures</h2><table><tr><th>by</th><th>strategy</th><th>over</th><th>step ms</th><th>min</th>"
      "<th>max</th><th>compute</th><th>waiting</th><th>update</th><th>x local</th><th>collectives</th></tr>";
  for (const auto& figure : figures) {
    html += fmt::format(
        "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</"
        "td><td>{}</td>"
        "<td>{}</td></tr>",
        figure["peer"] == "shoal" ? "shoal" : "python", std::string(figure["strategy"]),
        std::string(figure["transport"]), cell(figure["step_ms"]["median"], "{:.3f}"),
        cell(figure["step_ms"]["min"], "{:.3f}"), cell(figure["step_ms"]["max"], "{:.3f}"),
        cell(figure["compute_ms"], "{:.3f}"), cell(figure["exposed_comm_ms"], "{:.3f}"),
        cell(figure["update_ms"], "{:.3f}"), cell(figure.value("ratio_to_local", Json()), "{:.3f}"),
        cell(figure["collectives_per_step"], "{:.1f}"));
  }
  return html + "</table>";
}

}  // namespace

std::string html_report(const Json& report) {
  const auto& machine = report["machine"];
  const auto facts =
      fmt::format("{}, {} cores, {} GiB, {}; shoal {}, libtorch {}; load of the last minute {:.2f}",
                  std::string(machine["processor"]), machine["cores"].get<int>(), machine["memory_gib"].get<double>(),
                  std::string(machine["system"]), std::string(report["versions"]["shoal"]),
                  std::string(report["versions"]["libtorch"]), report["load_1min"].get<double>());
  std::string body;
  if (report.contains("collectives")) body += collectives_section(report["collectives"]);
  if (report.contains("train")) body += training_section(report["train"]);
  return fmt::format(
      "<!DOCTYPE html>\n<html xmlns=\"http://www.w3.org/1999/xhtml\" lang=\"en\"><head><meta charset=\"utf-8\"/>"
      "<title>shoal bench</title><style>{}</style></head><body><h1>shoal bench</h1><p "
      "class=\"note\">{}</p>{}</body></html>\n",
      style, escaped(facts), body);
}

}  // namespace shoal::cli
