#pragma once
// Plots as inline SVG, for readers without scripts. Everything stays inside the plot's box, whatever the names'
// lengths.

#include <string>
#include <utility>
#include <vector>

namespace shoal::cli {

// Text for XHTML, also inside attributes.
std::string escaped(const std::string& text);

// An SVG element; `anchor`: which end of the words is at x ("start", "middle", "end").
std::string text(double x, double y, const std::string& words, const char* anchor = "start");

// A colour by number; what has the same number on a page has the same colour.
struct Named {
  std::string name;
  int colour = 0;
};
constexpr int undivided = -1;  // grey: a limit, or something of which no more is known

struct Line {
  Named name;  // dashed when grey
  std::vector<std::pair<double, double>> points;
};

// Time in microseconds over size in bytes (both larger than zero), both logarithmic.
std::string line_plot(const std::string& title, const std::vector<Line>& lines);

struct Bar {
  std::string name;
  std::vector<double> parts;
};

// A bar for each entry, its parts in order, and their sum in `unit`. A legend is drawn for more than one part.
std::string bar_plot(const std::string& title, const std::string& unit, const std::vector<Named>& parts,
                     const std::vector<Bar>& bars);

}  // namespace shoal::cli
