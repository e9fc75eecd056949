// Topologies from JSON files. Every error names the file and the place in it.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>

#include "base/strict_json.h"
#include "shoal/error.h"
#include "shoal/topology.h"

namespace shoal {
namespace {

using Json = nlohmann::json;

// A value and its path: "rounds[1].edges[0]".
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
      fail(fmt::format("unknown key \"{:.100}\": it may have {}", key, fmt::join(known, ", ")));
    }
  }
  bool has(const char* key) const { return value_.contains(key); }
  Place at(const char* key) const {
    if (!has(key)) fail(fmt::format("\"{}\" is missing", key));
    return {value_[key], file_, path_.empty() ? key : path_ + "." + key};
  }

  // For lists that are not empty. One item at a time, because a Place takes more memory than its value.
  template <class Act>
  void for_each_item(const Act& act) const {
    if (!value_.is_array() || value_.empty()) fail("give a list that is not empty, [ .. ]");
    for (size_t i = 0; i < value_.size(); ++i) act(item(i));
  }
  Place item(size_t i) const { return {value_[i], file_, fmt::format("{}[{}]", path_, i)}; }
  void require_length(size_t length) const {
    if (!value_.is_array() || value_.empty()) fail("give a list that is not empty, [ .. ]");
    if (value_.size() != length) fail(fmt::format("give {} values, not {}", length, value_.size()));
  }

  int integer() const {
    const bool fits = value_.is_number_integer() && value_ >= std::numeric_limits<int>::min() &&
                      value_ <= std::numeric_limits<int>::max();
    if (!fits) fail(fmt::format("{} is not a whole number of a rank or of ranks", shown()));
    return value_.get<int>();
  }
  double number() const {
    if (!value_.is_number()) fail(fmt::format("{} is not a number", shown()));
    return value_.get<double>();
  }
  std::vector<int> integers() const {
    std::vector<int> list;
    for_each_item([&](const Place& item) { list.push_back(item.integer()); });
    return list;
  }

  Stochastic kind() const {
    for (const auto kind : {Stochastic::doubly, Stochastic::row, Stochastic::column}) {
      if (value_ == to_string(kind)) return kind;
    }
    fail(fmt::format("{}: give \"doubly\", \"row\" or \"column\"", shown()));
  }

 private:
  std::string shown() const { return fmt::format("{:.100}", value_.dump()); }

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
    round.at("groups").for_each_item([&](const Place& group) { spec.groups.push_back(group.integers()); });
  }
  if (round.has("weight")) spec.weight = round.at("weight").number();
  if (round.has("links")) {
    round.at("links").for_each_item([&](const Place& link) {
      link.require_length(2);
      spec.links.emplace_back(link.item(0).integer(), link.item(1).integer());
    });
  }
  if (round.has("edges")) {
    round.at("edges").for_each_item([&](const Place& edge) {
      edge.require_length(3);
      spec.edges.push_back({edge.item(0).integer(), edge.item(1).integer(), edge.item(2).number()});
    });
  }
  if (round.has("self")) {
    round.at("self").for_each_item([&](const Place& weight) { spec.self.push_back(weight.number()); });
  }
  if (round.has("idle")) spec.idle = round.at("idle").integers();
  return spec;
}

}  // namespace

Topology read_topology(const std::string& path) {
  constexpr int64_t longest = int64_t{16} << 20;
  constexpr JsonLimits limits{.depth = 8, .bytes = int64_t{512} << 20};
  const InputFile file(path, refuse_as<UsageError>);
  if (file.size() > longest) {
    throw UsageError(fmt::format("topology file {}: {} bytes; at most {} are read", path, file.size(), longest));
  }
  const auto json = parse_strict(file, limits, "topology file " + path, refuse_as<UsageError>);
  const Place top(json, path, "");
  top.require_keys({"ranks", "kind", "rounds"});
  const int size = top.at("ranks").integer();
  const auto kind = top.has("kind") ? top.at("kind").kind() : Stochastic::doubly;
  std::vector<RoundSpec> rounds;
  top.at("rounds").for_each_item([&](const Place& round) { rounds.push_back(read_round(round)); });
  try {
    return {std::filesystem::path(path).stem(), size, kind, rounds};
  } catch (const UsageError& error) {
    throw UsageError(fmt::format("topology file {}: {}", path, error.what()));
  }
}

}  // namespace shoal
