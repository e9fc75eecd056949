#include "cli/bench/table.h"

#include <fmt/format.h>

#include <algorithm>

#include "cli/bench/samples.h"

namespace shoal::cli {

std::vector<std::string> compared_with(const nlohmann::ordered_json& figures) {
  std::vector<std::string> present;
  for (const char* transport : {"gloo", "mpi"}) {
    const bool measured = std::any_of(figures.begin(), figures.end(),
                                      [&](const auto& figure) { return figure["transport"] == transport; });
    if (measured) present.emplace_back(transport);
  }
  return present;
}

nlohmann::ordered_json times_faster(const nlohmann::ordered_json& figures, const nlohmann::ordered_json& figure,
                                    const std::string& transport) {
  const auto other = std::find_if(figures.begin(), figures.end(), [&](const auto& each) {
    return each["transport"] == transport && each["op"] == figure["op"] && each["dtype"] == figure["dtype"] &&
           each["bytes"] == figure["bytes"];
  });
  if (other == figures.end()) return nullptr;
  return (*other)["median_us"].template get<double>() / figure["median_us"].get<double>();
}

std::string collectives_table(const nlohmann::ordered_json& figures) {
  const auto others = compared_with(figures);
  std::string text =
      fmt::format("{:<15} {:<9} {:>10} {:>6}  {:<6} {:<7} {:>11} {:>11} {:>11}  {:>8}", "operation", "dtype", "size",
                  "ranks", "over", "memory", "min us", "median us", "max us", "x memcpy");
  for (const auto& transport : others) text += fmt::format(" {:>8}", "x " + transport);
  text += "\n";
  for (const auto& figure : figures) {
    const double median = figure["median_us"];
    text += fmt::format("{:<15} {:<9} {:>10} {:>6}  {:<6} {:<7} {:>11.1f} {:>11.1f} {:>11.1f}",
                        std::string(figure["op"]), std::string(figure["dtype"]), format_bytes(figure["bytes"]),
                        int(figure["ranks"]), std::string(figure["transport"]), std::string(figure["buffers"]),
                        double(figure["min_us"]), median, double(figure["max_us"]));
    text += figure.contains("memcpy_us") ? fmt::format("  {:>8.2f}", median / double(figure["memcpy_us"]))
                                         : fmt::format("  {:>8}", "-");
    for (const auto& transport : others) {
      const auto ratio = times_faster(figures, figure, transport);
      text += ratio.is_null() ? fmt::format(" {:>8}", "-") : fmt::format(" {:>8.2f}", ratio.get<double>());
    }
    text += "\n";
  }
  return text;
}

}  // namespace shoal::cli
