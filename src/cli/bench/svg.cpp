#include "cli/bench/svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <set>

#include "cli/bench/samples.h"

namespace shoal::cli {
namespace {

constexpr double width = 900;
constexpr double letter = 7.5;  // wider than the average 12 px letter in common fonts
constexpr double line_height = 20;

double length_of(const std::string& text) {
  return letter * static_cast<double>(text.size());
}

// Distinguishable with any colour vision (Okabe and Ito).
constexpr std::array<const char*, 6> colours{"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"};

bool is_colour_used_before(int number) {
  return number >= static_cast<int>(colours.size());
}

const char* colour_of(int number) {
  return number == undivided ? "#8b949e" : colours[static_cast<size_t>(number) % colours.size()];
}

std::string rule(double x1, double y1, double x2, double y2) {
  return fmt::format("<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"#d8dee4\"/>", x1, y1, x2,
                     y2);
}

std::string framed(const std::string& title, double height, const std::string& content) {
  return fmt::format(
      "<div class=\"wide\"><svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" role=\"img\" "
      "aria-label=\"{}\">{}</svg></div>",
      width, height, escaped(title), content);
}

std::string format_time(double microseconds) {
  constexpr double step = 1000;
  if (microseconds < step) return fmt::format("{:.4g} µs", microseconds);
  if (microseconds < step * step) return fmt::format("{:.4g} ms", microseconds / step);
  return fmt::format("{:.4g} s", microseconds / (step * step));
}

// Maps values to positions on one axis, logarithmically.
struct Axis {
  double low, high;    // values
  double begin, size;  // positions

  double at(double value) const {
    return begin + size * (high > low ? std::log(value / low) / std::log(high / low) : 0.5);
  }
};

// Powers of ten around the values; if there are few, also 2 and 5 times each.
std::vector<double> time_ticks(double least, double most) {
  const double low = std::floor(std::log10(least));
  const double high = std::max(low + 1, std::ceil(std::log10(most)));
  std::vector<double> ticks;
  for (double power = low; power <= high; ++power) {
    for (const double factor : {1, 2, 5}) {
      if (factor > 1 && (high - low > 2 || power == high)) continue;
      ticks.push_back(factor * std::pow(10, power));
    }
  }
  return ticks;
}

// Sizes whose labels fit between the first and the last one.
std::set<double> labelled(const std::set<double>& sizes, const Axis& axis) {
  constexpr double room = 62;  // width of "1023 KiB"
  std::set<double> kept{*sizes.begin(), *sizes.rbegin()};
  double free = axis.at(*sizes.begin()) + room;
  for (const double size : sizes) {
    if (axis.at(size) < free || axis.at(size) > axis.at(*sizes.rbegin()) - room) continue;
    kept.insert(size);
    free = axis.at(size) + room;
  }
  return kept;
}

std::string drawn(const Line& line, const Axis& x, const Axis& y) {
  const auto* colour = colour_of(line.name.colour);
  std::string path;
  std::string points;
  for (const auto& [size, time] : line.points) {
    path += fmt::format("{:.1f},{:.1f} ", x.at(size), y.at(time));
    points += fmt::format(
        "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3.5\" fill=\"{}\"><title>{}: {}, {}</title></circle>", x.at(size),
        y.at(time), colour, escaped(line.name.name), format_bytes(static_cast<int64_t>(size)), format_time(time));
  }
  return fmt::format("<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\"{}/>{}", path, colour,
                     line.name.colour == undivided ? " stroke-dasharray=\"6 4\"" : "", points);
}

std::string legend_entry(double x, double y, const Named& named) {
  return fmt::format("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"12\" height=\"12\" rx=\"2\" fill=\"{}\"/>", x, y - 10,
                     colour_of(named.colour)) +
         text(x + 18, y, named.name);
}

// Four to ten round numbers from the least to the most, or beyond.
std::vector<double> linear_ticks(double least, double most) {
  // Differences that numbers of this size can show.
  const double size = std::max(std::abs(least), std::abs(most));
  most = std::max(most, least + std::max(1e-300, size > 0 ? 1e-6 * size : 1e-9));
  const double rough = (most - least) / 5;
  const double power = std::pow(10, std::floor(std::log10(rough)));
  double step = 10 * power;
  for (const double factor : {1, 2, 5}) {
    if (factor * power >= rough) {
      step = factor * power;
      break;
    }
  }
  std::vector<double> ticks;
  const double first = std::floor(least / step);
  for (double i = first; ticks.empty() || ticks.back() < most; ++i) ticks.push_back(i * step);
  return ticks;
}

// With the digits that tell it from its neighbours, and at least those of a short number.
std::string tick_label(double tick, double step) {
  if (std::abs(tick) < step / 2) return "0";
  const auto exponent = static_cast<int>(std::floor(std::log10(std::abs(tick))));
  const auto digits = exponent - static_cast<int>(std::floor(std::log10(step) + 1e-9)) + 1;
  return fmt::format("{:.{}g}", tick, std::max({digits, 4, exponent < 7 ? exponent + 1 : 0}));
}

}  // namespace

std::string escaped(const std::string& text) {
  std::string result;
  for (const char c : text) {
    if (c == '<') {
      result += "&lt;";
    } else if (c == '>') {
      result += "&gt;";
    } else if (c == '&') {
      result += "&amp;";
    } else if (c == '"') {
      result += "&quot;";
    } else {
      result += c;
    }
  }
  return result;
}

std::string text(double x, double y, const std::string& words, const char* anchor) {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>", x, y, anchor, escaped(words));
}

std::string line_plot(const std::string& title, const std::vector<Line>& lines) {
  constexpr double left = 70, top = 12, plot_height = 280;
  std::set<double> sizes;
  std::set<double> times;
  double legend = 0;
  for (const auto& line : lines) {
    legend = std::max(legend, 18 + length_of(line.name.name));
    for (const auto& [size, time] : line.points) {
      sizes.insert(size);
      times.insert(time);
    }
  }
  const auto ticks = time_ticks(*times.begin(), *times.rbegin());
  const double plot_width = width - left - legend - 50;
  const Axis x{*sizes.begin(), *sizes.rbegin(), left, plot_width};
  const Axis y{ticks.front(), ticks.back(), top + plot_height, -plot_height};
  std::string svg;
  for (const double tick : ticks) {
    svg += rule(left, y.at(tick), left + plot_width, y.at(tick));
    svg += text(left - 8, y.at(tick) + 4, format_time(tick), "end");
  }
  for (const double size : sizes) svg += rule(x.at(size), top, x.at(size), top + plot_height);
  for (const double size : labelled(sizes, x)) {
    svg += text(x.at(size), top + plot_height + 20, format_bytes(static_cast<int64_t>(size)), "middle");
  }
  double row = top + 14;
  for (const auto& line : lines) {
    svg += drawn(line, x, y) + legend_entry(left + plot_width + 40, row, line.name);
    row += line_height;
  }
  return framed(title, std::max(top + plot_height + 30, row), svg);
}

std::string curve_plot(const std::string& title, const std::string& unit, const std::vector<Line>& lines) {
  constexpr double left = 90, top = 12, plot_height = 240, plot_width = width - left - 20;
  double first = lines[0].points[0].first, last = first, least = lines[0].points[0].second, most = least;
  for (const auto& line : lines) {
    for (const auto& [step, value] : line.points) {
      first = std::min(first, step);
      last = std::max(last, step);
      least = std::min(least, value);
      most = std::max(most, value);
    }
  }
  const auto ticks = linear_ticks(least, most);
  const auto x = [&](double step) {
    return left + plot_width * (last > first ? (step - first) / (last - first) : 0.5);
  };
  const auto y = [&](double value) {
    return top + plot_height * (1 - (value - ticks.front()) / (ticks.back() - ticks.front()));
  };
  std::string svg;
  for (const double tick : ticks) {
    svg += rule(left, y(tick), left + plot_width, y(tick));
    svg += text(left - 8, y(tick) + 4, tick_label(tick, ticks[1] - ticks[0]) + unit, "end");
  }
  svg += text(left, top + plot_height + 20, fmt::format("step {:.0f}", first), "start");
  if (last > first) svg += text(left + plot_width, top + plot_height + 20, fmt::format("{:.0f}", last), "end");
  std::string legend;
  for (const auto& line : lines) {
    std::string path;
    for (const auto& [step, value] : line.points) path += fmt::format("{:.1f},{:.1f} ", x(step), y(value));
    const auto* colour = colour_of(line.name.colour);
    if (line.points.size() < 50) {  // evaluations, and short runs
      for (const auto& [step, value] : line.points) {
        svg += fmt::format(
            "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\" fill=\"{}\"><title>{}: step {:.0f}, {:.6g}</title></circle>",
            x(step), y(value), colour, escaped(line.name.name), step, value);
      }
    }
    const bool dashed = is_colour_used_before(line.name.colour);
    svg += fmt::format("<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"1.5\"{}/>", path, colour,
                       dashed ? " stroke-dasharray=\"6 4\"" : "");
    legend += fmt::format("<span><i style=\"border-top: 3px {} {}\"></i>{}</span> ", dashed ? "dashed" : "solid",
                          colour, escaped(line.name.name));
  }
  return fmt::format("<p class=\"legend\">{}</p>", legend) + framed(title, top + plot_height + 30, svg);
}

std::string bar_plot(const std::string& title, const std::string& unit, const std::vector<Named>& parts,
                     const std::vector<Bar>& bars) {
  constexpr double row = 28, thickness = 18, room_for_sum = 110;
  double left = 0;
  double most = 0;
  for (const auto& bar : bars) {
    left = std::max(left, 10 + length_of(bar.name));
    double sum = 0;
    for (const double part : bar.parts) sum += part;
    most = std::max(most, sum);
  }
  const double scale = most > 0 ? (width - left - room_for_sum) / most : 0;
  std::string svg;
  double y = 4;
  if (parts.size() > 1) {
    double x = left;
    for (const auto& part : parts) {
      svg += legend_entry(x, y + 10, part);
      x += 18 + length_of(part.name) + 24;
    }
    y += 26;
  }
  for (const auto& bar : bars) {
    svg += text(left - 8, y + 14, bar.name, "end");
    double x = left;
    double sum = 0;
    for (size_t part = 0; part < bar.parts.size(); ++part) {
      const double length = bar.parts[part] * scale;
      sum += bar.parts[part];
      if (bar.parts[part] <= 0) continue;
      svg += fmt::format(
          "<rect class=\"part\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{}\" fill=\"{}\"><title>{}: {}: "
          "{:.4g} {}</title></rect>",
          x, y, length, thickness, colour_of(parts[part].colour), escaped(bar.name), escaped(parts[part].name),
          bar.parts[part], escaped(unit));
      x += length;
    }
    svg += text(x + 8, y + 14, fmt::format("{:.4g} {}", sum, unit));
    y += row;
  }
  return framed(title, y + 6, svg);
}

}  // namespace shoal::cli
