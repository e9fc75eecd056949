#include "cli/topology/drawing.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "cli/bench/page.h"
#include "cli/bench/svg.h"
#include "cli/topology/words.h"

namespace shoal::cli {
namespace {

constexpr double width = 900;
constexpr int in_row = 3;
constexpr double panel = width / in_row;
constexpr double heading = 30;
constexpr int64_t most_rounds_drawn = 12;
constexpr int most_on_circle = 32;

constexpr const char* line_colour = "#0072b2";

struct Point {
  double x, y;
};

// Circle of a panel, whose upper left corner is `corner`.
class Circle {
 public:
  Circle(Point corner, int ranks) : corner_(corner), ranks_(ranks) {
    const double room = 2 * std::numbers::pi * radius / ranks;
    node_ = std::min(13.0, 0.4 * room);
  }

  double node() const { return node_; }
  Point at(int rank) const {
    const double angle = 2 * std::numbers::pi * rank / ranks_ - std::numbers::pi / 2;
    return {corner_.x + panel / 2 + radius * std::cos(angle), corner_.y + panel / 2 + radius * std::sin(angle)};
  }

 private:
  static constexpr double radius = 0.38 * panel;

  Point corner_;
  int ranks_;
  double node_;
};

std::string edge(const Circle& circle, int from, int to, double weight, bool mutual) {
  const auto begin = circle.at(from);
  const auto end = circle.at(to);
  const double length = std::hypot(end.x - begin.x, end.y - begin.y);
  const double dx = (end.x - begin.x) / length;
  const double dy = (end.y - begin.y) / length;
  constexpr double arrow = 7;
  const double stop = circle.node() + (mutual ? 0 : arrow);
  return fmt::format(
      "<line class=\"edge\" x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"{}\" "
      "stroke-width=\"{:.2f}\"{}><title>{} {} {}: {:.4g}</title></line>",
      begin.x + dx * circle.node(), begin.y + dy * circle.node(), end.x - dx * stop, end.y - dy * stop, line_colour,
      0.6 + 3 * weight, mutual ? "" : " marker-end=\"url(#arrow)\"", from, mutual ? "and" : "to", to, weight);
}

std::string on_circle(const MixingRound& round, Point corner) {
  const Circle circle(corner, round.size());
  std::string svg;
  for (int to = 0; to < round.size(); ++to) {
    for (const auto& [from, weight] : round.sources(to)) {
      const auto& back = round.sources(from);
      const bool mutual = std::find(back.begin(), back.end(), Neighbour{to, weight}) != back.end();
      if (!mutual || from < to) svg += edge(circle, from, to, weight, mutual);
    }
  }
  for (int rank = 0; rank < round.size(); ++rank) {
    const auto [x, y] = circle.at(rank);
    svg += fmt::format(
        "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{:.1f}\" fill=\"{}\" stroke=\"#1b1f24\"><title>rank {} keeps "
        "{:.4g}</title></circle>",
        x, y, circle.node(), round.idle(rank) ? "#d8dee4" : "#ffffff", rank, round.self(rank));
    svg += text(x, y + 4, std::to_string(rank), "middle");
  }
  return svg;
}

// Rows receive, columns send; darker for larger weights.
std::string as_matrix(const MixingRound& round, Point corner) {
  constexpr double margin = 16;
  const double cell = (panel - 2 * margin) / round.size();
  std::string svg = fmt::format(
      "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"none\" stroke=\"#d8dee4\"/>",
      corner.x + margin, corner.y + margin, panel - 2 * margin, panel - 2 * margin);
  const auto fill = [&](int to, int from, double weight) {
    if (weight == 0) return;
    svg += fmt::format(
        "<rect x=\"{:.2f}\" y=\"{:.2f}\" width=\"{:.2f}\" height=\"{:.2f}\" fill=\"{}\" fill-opacity=\"{:.2f}\"/>",
        corner.x + margin + from * cell, corner.y + margin + to * cell, cell, cell, line_colour, 0.25 + 0.75 * weight);
  };
  for (int to = 0; to < round.size(); ++to) {
    fill(to, to, round.self(to));
    for (const auto& [from, weight] : round.sources(to)) fill(to, from, weight);
  }
  return svg;
}

std::string document(double height, const std::string& label, const std::string& content) {
  return fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\" "
      "font-family=\"system-ui, DejaVu Sans, sans-serif\" font-size=\"12\">{}</svg>\n",
      width, height, escaped(label), content);
}

std::string table(const TopologyReport& report) {
  std::string html = "<div class=\"wide\"><table><tbody>";
  for (const auto& [what, figure] : report_lines(report)) {
    html += fmt::format("<tr><td class=\"words\">{}</td><td>{}</td></tr>\n", escaped(what), escaped(figure));
  }
  return html + "</tbody></table></div>";
}

}  // namespace

std::string rounds_drawing(const Topology& topology) {
  const auto shown = std::min(topology.period(), most_rounds_drawn);
  std::string svg =
      "<defs><marker id=\"arrow\" viewBox=\"0 0 8 8\" refX=\"1\" refY=\"4\" markerWidth=\"8\" markerHeight=\"8\" "
      "markerUnits=\"userSpaceOnUse\" orient=\"auto\"><path d=\"M0 0 L8 4 L0 8 z\" fill=\"#0072b2\"/></marker></defs>";
  for (int64_t index = 0; index < shown; ++index) {
    const Point corner{panel * static_cast<double>(index % in_row),
                       (panel + heading) * static_cast<double>(index / in_row) + heading};
    svg += text(corner.x + panel / 2, corner.y - 8, fmt::format("round {}", index), "middle");
    const auto& round = topology.round(index);
    svg += topology.size() <= most_on_circle ? on_circle(round, corner) : as_matrix(round, corner);
  }
  const auto rows = static_cast<double>((shown + in_row - 1) / in_row);
  return document(rows * (panel + heading), "rounds of " + topology.fingerprint(), svg);
}

std::string distance_drawing(const TopologyReport& report) {
  constexpr double left = 70, top = 12, plot_width = 780, plot_height = 220;
  constexpr int decades = 3;
  const auto last = std::max<size_t>(1, report.distance.size() - 1);
  const auto x = [&](size_t step) { return left + plot_width * static_cast<double>(step) / static_cast<double>(last); };
  // Values below the lowest line are drawn on it.
  const auto y = [&](double distance) {
    const double power = distance > 0 ? -std::log10(distance) : decades;
    return top + plot_height * std::clamp(power / decades, 0.0, 1.0);
  };
  std::string svg;
  for (int power = 0; power <= decades; ++power) {
    const double place = y(std::pow(10, -power));
    svg += fmt::format("<line x1=\"{0}\" y1=\"{1:.1f}\" x2=\"{2}\" y2=\"{1:.1f}\" stroke=\"#d8dee4\"/>", left, place,
                       left + plot_width);
    svg += text(left - 8, place + 4, fmt::format("{:g}", std::pow(10, -power)), "end");
  }
  const size_t between = (last + 9) / 10;
  std::string path, points;
  for (size_t step = 0; step < report.distance.size(); ++step) {
    const double distance = report.distance[step];
    path += fmt::format("{:.1f},{:.1f} ", x(step), y(distance));
    points +=
        fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3.5\" fill=\"{}\"><title>step {}: {:.3g}</title></circle>",
                    x(step), y(distance), line_colour, step, distance);
    if (step % between == 0) svg += text(x(step), top + plot_height + 20, std::to_string(step), "middle");
  }
  svg += fmt::format("<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\"/>", path, line_colour);
  return document(top + plot_height + 30, "consensus distance by step", svg + points);
}

std::string topology_page(const Topology& topology, const TopologyReport& report) {
  const auto shown = std::min(topology.period(), most_rounds_drawn);
  auto body = table(report);
  body +=
      "<h2>Consensus distance by step</h2><p class=\"note\">Relative to the start, root mean square over independent "
      "starts of the ranks.</p><div class=\"wide\">" +
      distance_drawing(report) + "</div>";
  body += fmt::format("<h2>Rounds</h2><p class=\"note\">{}. Grey ranks idle.</p><div class=\"wide\">{}</div>",
                      shown < topology.period() ? fmt::format("The first {} of {}", shown, topology.period())
                                                : "All, one after the other, again and again",
                      rounds_drawing(topology));
  return html_page("shoal topology", topology.fingerprint(), body);
}

}  // namespace shoal::cli
