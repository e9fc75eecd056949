#include "cli/bench/table.h"

#include <fmt/format.h>

#include <algorithm>

#include "cli/bench/samples.h"

namespace shoal::cli {

std::string collectives_table(const nlohmann::ordered_json& figures) {
  std::string text =
      fmt::format("{:<15} {:<9} {:>10} {:>6}  {:<6} {:<7} {:>11} {:>11} {:>11}  {:>8} {:>8}\n", "operation", "dtype",
                  "size", "ranks", "over", "memory", "min us", "median us", "max us", "x memcpy", "x gloo");
  for (const auto& figure : figures) {
    const auto gloo = std::find_if(figures.begin(), figures.end(), [&](const auto& other) {
      return other["transport"] == "gloo" && other["op"] == figure["op"] && other["dtype"] == figure["dtype"] &&
             other["bytes"] == figure["bytes"];
    });
    const double median = figure["median_us"];
    text += fmt::format("{:<15} {:<9} {:>10} {:>6}  {:<6} {:<7} {:>11.1f} {:>11.1f} {:>11.1f}",
                        std::string(figure["op"]), std::string(figure["dtype"]), format_bytes(figure["bytes"]),
                        int(figure["ranks"]), std::string(figure["transport"]), std::string(figure["buffers"]),
                        double(figure["min_us"]), median, double(figure["max_us"]));
    text += figure.contains("memcpy_us") ? fmt::format("  {:>8.2f}", median / double(figure["memcpy_us"])) : "";
    if (gloo != figures.end()) text += fmt::format(" {:>8.2f}", double((*gloo)["median_us"]) / median);
    text += "\n";
  }
  return text;
}

std::string training_table(const nlohmann::ordered_json& figures) {
  const auto number = [](const nlohmann::ordered_json& value, const char* format) {
    return value.is_null() ? std::string("-") : fmt::format(fmt::runtime(format), value.get<double>());
  };
  std::string text =
      fmt::format("{:<9} {:<10} {:<6} {:>10} {:>10} {:>9} {:>9} {:>9} {:>12} {:>9} {:>8}\n", "by", "strategy", "over",
                  "step ms", "min ms", "compute", "exposed", "update", "wire B/step", "growth MiB", "x local");
  for (const auto& figure : figures) {
    text += fmt::format("{:<9} {:<10} {:<6} {:>10} {:>10} {:>9} {:>9} {:>9} {:>12} {:>9} {:>8}\n",
                        figure["peer"] == "shoal" ? "shoal" : "python", std::string(figure["strategy"]),
                        std::string(figure["transport"]), number(figure["step_ms"]["median"], "{:.3f}"),
                        number(figure["step_ms"]["min"], "{:.3f}"), number(figure["compute_ms"], "{:.3f}"),
                        number(figure["exposed_comm_ms"], "{:.3f}"), number(figure["update_ms"], "{:.3f}"),
                        number(figure["wire_bytes_per_step"], "{:.0f}"), number(figure["memory"]["growth"], "{:.1f}"),
                        number(figure.value("ratio_to_local", nlohmann::ordered_json()), "{:.3f}"));
  }
  return text;
}

}  // namespace shoal::cli
