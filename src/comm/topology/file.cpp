// Topologies from JSON files. Every complaint names the file and the place in it.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>

#include "shoal/base/error.h"
#include "shoal/comm/topology.h"

namespace shoal {
namespace {

using Json = nlohmann::json;

// A value and where it stands: "rounds[1].edges[0]".
class Place {
 public:
  Place(const Json& value, std::string file, std::string path)
      : value_(value), file_(std::move(file)), path_(std::move(path)) {}

  [[noreturn]] void fail(const std::string& what) const {
    throw UsageError(fmt::format("topology file {}: {}{}", file_, path_.empty() ? "" : path_ + ": ", what));
  }

  void require_keys(std::initializer_list<const char*> known) const {
    if (!value_.is_object()) fail("give an object, { .. }");
    for (const auto& [key, value] : value_.items()) {
      if (std::find(known.begin(), known.end(), key) != known.end()) continue;
      fail(fmt::format("unknown key \"{}\": it may have {}", key, fmt::join(known, ", ")));
    }
  }
  bool has(const char* key) const { return value_.contains(key); }
  Place at(const char* key) const {
    if (!has(key)) fail(fmt::format("\"{}\" is missing", key));
    return {value_[key], file_, path_.empty() ? key : path_ + "." + key};
  }

  // Of a list; `length`: what it must have, 0 for any but none.
  std::vector<Place> items(size_t length = 0) const {
    if (!value_.is_array() || value_.empty()) fail("give a list that is not empty, [ .. ]");
    if (length > 0 && value_.size() != length) fail(fmt::format("give {} values, not {}", length, value_.size()));
    std::vector<Place> list;
    for (size_t i = 0; i < value_.size(); ++i) list.emplace_back(value_[i], file_, fmt::format("{}[{}]", path_, i));
    return list;
  }

  int integer() const {
    const bool fits = value_.is_number_integer() && value_ >= std::numeric_limits<int>::min() &&
                      value_ <= std::numeric_limits<int>::max();
    if (!fits) fail(fmt::format("{} is not a whole number of a rank or of ranks", value_.dump()));
    return value_.get<int>();
  }
  double number() const {
    if (!value_.is_number()) fail(fmt::format("{} is not a number", value_.dump()));
    return value_.get<double>();
  }
  std::vector<int> integers() const {
    std::vector<int> list;
    for (const auto& item : items()) list.push_back(item.integer());
    return list;
  }

  Stochastic kind() const {
    for (const auto kind : {Stochastic::doubly, Stochastic::row, Stochastic::column}) {
      if (value_ == to_string(kind)) return kind;
    }
    fail(fmt::format("{}: give \"doubly\", \"row\" or \"column\"", value_.dump()));
  }

 private:
  const Json& value_;
  std::string file_;
  std::string path_;
};

RoundSpec read_round(const Place& round) {
  round.require_keys({"groups", "weight", "links", "edges", "self", "idle"});
  RoundSpec spec;
  if (!round.has("groups") && !round.has("links") && !round.has("edges")) {
    round.fail("give one of \"groups\", \"links\" and \"edges\"");
  }
  if (round.has("groups")) {
    for (const auto& group : round.at("groups").items()) spec.groups.push_back(group.integers());
  }
  if (round.has("weight")) spec.weight = round.at("weight").number();
  if (round.has("links")) {
    for (const auto& link : round.at("links").items()) {
      const auto ends = link.items(2);
      spec.links.emplace_back(ends[0].integer(), ends[1].integer());
    }
  }
  if (round.has("edges")) {
    for (const auto& edge : round.at("edges").items()) {
      const auto parts = edge.items(3);
      spec.edges.push_back({parts[0].integer(), parts[1].integer(), parts[2].number()});
    }
  }
  if (round.has("self")) {
    for (const auto& weight : round.at("self").items()) spec.self.push_back(weight.number());
  }
  if (round.has("idle")) spec.idle = round.at("idle").integers();
  return spec;
}

}  // namespace

Topology read_topology(const std::string& path) {
  std::ifstream file(path);
  if (!file || !std::filesystem::is_regular_file(path)) {
    throw UsageError(fmt::format("topology file {}: cannot be read", path));
  }
  Json json;
  try {
    json = Json::parse(file);
  } catch (const Json::exception& error) {
    throw UsageError(fmt::format("topology file {}: not JSON: {}", path, error.what()));
  }
  const Place top(json, path, "");
  top.require_keys({"ranks", "kind", "rounds"});
  const int size = top.at("ranks").integer();
  const auto kind = top.has("kind") ? top.at("kind").kind() : Stochastic::doubly;
  std::vector<RoundSpec> rounds;
  for (const auto& round : top.at("rounds").items()) rounds.push_back(read_round(round));
  try {
    return {std::filesystem::path(path).stem(), size, kind, rounds};
  } catch (const UsageError& error) {
    throw UsageError(fmt::format("topology file {}: {}", path, error.what()));
  }
}

}  // namespace shoal
