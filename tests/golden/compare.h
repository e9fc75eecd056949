#pragma once
// Comparison of a training run's report with a reference peer's result for the same run.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

namespace shoal::golden {

// Maximum differences. Loss: absolute up to 1, relative beyond. A tensor's abs_sum and l2: relative to themselves; sum
// and probe, whose terms may cancel: relative to abs_sum.
struct Tolerance {
  double loss = 1e-5;
  double digest = 1e-5;
};

// Adam turns rounding noise of small gradients into visible steps: the Python oracle of gpt_adamw_w2_accumulate3,
// repeated with the same versions on another processor, differs from its own abs_sum of blocks.1.ln1.bias by 1.1e-5.
inline Tolerance tolerance_for(const nlohmann::json& config) {
  const bool adaptive = config.at("optimizer").get<std::string>().starts_with("adam");
  return {.digest = adaptive ? 3e-5 : 1e-5};
}

// Loads a file of this folder; README.md describes the layout.
inline nlohmann::json load(const std::filesystem::path& file) {
  std::ifstream stream(file);
  if (!stream) throw std::runtime_error("cannot read " + file.string());
  return nlohmann::json::parse(stream);
}

namespace detail {

using nlohmann::json;
using Differences = std::vector<std::string>;

// Golden files keep a digest as [sum, abs_sum, l2, probe]; reports name the four.
inline constexpr std::array<const char*, 4> digest_fields{"sum", "abs_sum", "l2", "probe"};

inline std::string text(double value) {
  return json(value).dump();
}

inline void compare_number(const std::string& what, double got, double expected, double allowed, Differences& found) {
  // Written so that NaN counts as a difference.
  if (std::abs(got - expected) <= allowed) return;
  found.push_back(what + ": " + text(got) + " instead of " + text(expected) + ", off by " +
                  text(std::abs(got - expected)) + ", allowed " + text(allowed));
}

inline void compare_losses(const json& report, const json& expected, double tolerance, Differences& found) {
  if (report.size() != expected.size()) {
    found.push_back(std::to_string(report.size()) + " losses instead of " + std::to_string(expected.size()));
    return;
  }
  for (size_t step = 0; step < expected.size(); ++step) {
    const double loss = expected[step];
    compare_number("loss of step " + std::to_string(step), report[step], loss,
                   tolerance * std::max(1.0, std::abs(loss)), found);
  }
}

inline void compare_digest(const std::string& name, const json& report, const json& expected, double tolerance,
                           Differences& found) {
  const double abs_sum = expected[1];
  const double l2 = expected[2];
  const std::array<double, 4> scales{abs_sum, abs_sum, l2, abs_sum};
  // Makes a tensor of zeros comparable in spite of rounding noise.
  constexpr double smallest = 1e-9;
  for (size_t i = 0; i < digest_fields.size(); ++i) {
    compare_number(name + " " + digest_fields[i], report.at(digest_fields[i]), expected[i],
                   tolerance * std::max(scales[i], smallest), found);
  }
}

// `shapes` may be null, for tensors without shapes in the file.
inline void compare_tensors(const std::string& kind, const json& report, const json& expected, const json& shapes,
                            double tolerance, Differences& found) {
  for (const auto& [name, tensor] : report.items()) {
    if (!expected.contains(name)) found.push_back(kind + " " + name + " is not in the reference run");
  }
  for (const auto& [name, digest] : expected.items()) {
    const std::string what = kind + " " + name;
    if (!report.contains(name)) {
      found.push_back(what + " is missing");
      continue;
    }
    const json& tensor = report.at(name);
    if (shapes.contains(name) && tensor.at("shape") != shapes.at(name)) {
      found.push_back(what + ": shape " + tensor.at("shape").dump() + " instead of " + shapes.at(name).dump());
    }
    compare_digest(what, tensor, digest, tolerance, found);
  }
}

}  // namespace detail

// Differences, one line each, between `report` (written by `shoal train --json`: loss, params, buffers) and the run of
// `peer` in the golden file `reference`. Empty if they are equal within tolerance_for() the file's config. Throws
// nlohmann::json::exception if either lacks a part.
inline std::vector<std::string> compare(const nlohmann::json& report, const nlohmann::json& reference,
                                        const std::string& peer) {
  const Tolerance tolerance = tolerance_for(reference.at("config"));
  const nlohmann::json& expected = reference.at("peers").at(peer);
  const auto none = nlohmann::json::object();
  detail::Differences found;
  detail::compare_losses(report.at("loss"), expected.at("loss"), tolerance.loss, found);
  detail::compare_tensors("parameter", report.at("params"), expected.at("params"), reference.at("shapes"),
                          tolerance.digest, found);
  detail::compare_tensors("buffer", report.value("buffers", none), expected.value("buffers", none), none,
                          tolerance.digest, found);
  return found;
}

}  // namespace shoal::golden
