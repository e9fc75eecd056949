#pragma once
// Plots as inline SVG. Everything stays inside the plot's box, whatever the lengths of names.

#include <string>
#include <utility>
#include <vector>

namespace shoal::cli {

// Escapes text for XHTML, including attributes.
std::string escaped(const std::string& text);

// SVG text element. anchor: the part of the text that is at x ("start", "middle", "end").
std::string text(double x, double y, const std::string& words, const char* anchor = "start");

// Name with a colour number; equal numbers on a page have the same colour.
struct Named {
  std::string name;
  int colour = 0;
};
constexpr int undivided = -1;  // grey: a limit, or a whole without known parts

struct Line {
  Named name;                                     // dashed if grey
  std::vector<std::pair<double, double>> points;  // ascending
};

// Plots time in microseconds over size in bytes (both positive), both logarithmic.
std::string line_plot(const std::string& title, const std::vector<Line>& lines);

// Values over steps, both linear, below a legend that any screen shows. Values and steps are finite; every line has at
// least one point.
std::string curve_plot(const std::string& title, const std::string& unit, const std::vector<Line>& lines);

struct Bar {
  std::string name;
  std::vector<double> parts;
};

// Plots a bar for each entry: its parts in order, and their sum in `unit`. With a legend if there are several parts.
std::string bar_plot(const std::string& title, const std::string& unit, const std::vector<Named>& parts,
                     const std::vector<Bar>& bars);

}  // namespace shoal::cli
