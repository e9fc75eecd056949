#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "shoal/error.h"
#include "shoal/topology.h"

namespace shoal {
namespace {

constexpr double tolerance = 1e-9;  // of sums

// Collects a round's edges and refuses invalid ones.
class Builder {
 public:
  Builder(int size, std::string where) : where_(std::move(where)), size_(size), sources_(size), targets_(size) {}

  [[noreturn]] void fail(const std::string& what) const { throw UsageError(where_ + ": " + what); }

  void check_rank(int rank, const std::string& of) const {
    if (is_rank(rank)) return;
    fail(fmt::format("rank {} {}: ranks are 0 to {}", rank, of, size_ - 1));
  }

  void add(int from, int to, double weight) {
    // Also refuses NaN.
    const bool valid = is_rank(from) && is_rank(to) && from != to && weight > 0 && weight <= 1;
    if (!valid) refuse(from, to, weight);
    sources_[to].push_back({from, weight});
    targets_[from].push_back(to);
  }

  bool has_edges(int rank) const { return !sources_[rank].empty() || !targets_[rank].empty(); }

  void finish(std::vector<std::vector<Neighbour>>& sources, std::vector<std::vector<int>>& targets) {
    for (int to = 0; to < size_; ++to) {
      auto& list = sources_[to];
      std::sort(list.begin(), list.end(), [](const auto& a, const auto& b) { return a.rank < b.rank; });
      const auto twice =
          std::adjacent_find(list.begin(), list.end(), [](const auto& a, const auto& b) { return a.rank == b.rank; });
      if (twice != list.end()) fail(fmt::format("edge {} -> {} occurs twice", twice->rank, to));
    }
    for (auto& list : targets_) std::sort(list.begin(), list.end());
    sources = std::move(sources_);
    targets = std::move(targets_);
  }

 private:
  bool is_rank(int rank) const { return rank >= 0 && rank < size_; }

  [[noreturn]] void refuse(int from, int to, double weight) const {
    const auto edge = fmt::format("edge {} -> {}", from, to);
    check_rank(from, "in " + edge);
    check_rank(to, "in " + edge);
    if (from == to) fail(edge + ": a rank has no edge to itself; give its own weight in `self`");
    fail(fmt::format("{} has weight {}: give a weight above 0, up to 1", edge, weight));
  }

  std::string where_;
  int size_;
  std::vector<std::vector<Neighbour>> sources_;
  std::vector<std::vector<int>> targets_;
};

void add_groups(Builder& builder, const RoundSpec& spec, int size) {
  if (spec.weight && !(*spec.weight >= 0 && *spec.weight <= 1)) {
    builder.fail(fmt::format("weight {}: give one from 0 to 1", *spec.weight));
  }
  std::vector<bool> covered(size);
  for (const auto& group : spec.groups) {
    if (group.empty()) builder.fail("a group is empty");
    for (const int rank : group) {
      builder.check_rank(rank, "in a group");
      if (covered[rank]) builder.fail(fmt::format("rank {} is in two groups, or twice in one", rank));
      covered[rank] = true;
    }
    if (group.size() == 1) continue;
    const auto count = static_cast<double>(group.size());
    const double others = spec.weight ? (1 - *spec.weight) / (count - 1) : 1 / count;
    if (others == 0) continue;  // all ranks keep their own values
    for (const int to : group) {
      for (const int from : group) {
        if (from != to) builder.add(from, to, others);
      }
    }
  }
  const auto missing = std::find(covered.begin(), covered.end(), false);
  if (missing == covered.end()) return;
  builder.fail(
      fmt::format("rank {} is in no group: give it a group of its own if it idles", missing - covered.begin()));
}

void add_links(Builder& builder, const RoundSpec& spec, int size) {
  std::vector<int> degree(size);
  for (const auto& [a, b] : spec.links) {
    for (const int rank : {a, b}) {
      builder.check_rank(rank, fmt::format("in link {} - {}", a, b));
      ++degree[rank];
    }
  }
  for (const auto& [a, b] : spec.links) {
    const double weight = 1.0 / (1 + std::max(degree[a], degree[b]));
    builder.add(a, b, weight);
    builder.add(b, a, weight);
  }
}

void add_edges(Builder& builder, const RoundSpec& spec, int size) {
  for (const auto& edge : spec.edges) builder.add(edge.from, edge.to, edge.weight);
  if (!spec.self.empty() && static_cast<int>(spec.self.size()) != size) {
    builder.fail(fmt::format("self has {} weights for {} ranks", spec.self.size(), size));
  }
  for (size_t rank = 0; rank < spec.self.size(); ++rank) {
    if (spec.self[rank] >= 0 && spec.self[rank] <= 1) continue;
    builder.fail(fmt::format("rank {} has the own weight {}: give a weight from 0 to 1", rank, spec.self[rank]));
  }
}

void check_form(const Builder& builder, const RoundSpec& spec) {
  const int forms = (spec.groups.empty() ? 0 : 1) + (spec.links.empty() ? 0 : 1) + (spec.edges.empty() ? 0 : 1);
  if (forms > 1) builder.fail("give one of groups, links and edges");
  if (spec.weight && spec.groups.empty()) builder.fail("weight is for groups");
  if (!spec.groups.empty() && !spec.idle.empty())
    builder.fail("idle is for links and edges: here it is a group of one");
  if (!spec.self.empty() && (!spec.groups.empty() || !spec.links.empty())) builder.fail("self is for edges");
}

// Checks that every rank has an edge or is listed as idle.
void check_covered(const Builder& builder, const RoundSpec& spec, int size) {
  std::vector<bool> idle(size);
  for (const int rank : spec.idle) {
    builder.check_rank(rank, "in idle");
    if (idle[rank]) builder.fail(fmt::format("rank {} is twice in idle", rank));
    if (builder.has_edges(rank)) builder.fail(fmt::format("rank {} is in idle, but has edges", rank));
    idle[rank] = true;
  }
  for (int rank = 0; rank < size; ++rank) {
    if (idle[rank] || builder.has_edges(rank)) continue;
    builder.fail(fmt::format("rank {} has no edge: name it in idle if that is meant", rank));
  }
}

}  // namespace

std::string to_string(Stochastic kind) {
  switch (kind) {
    case Stochastic::doubly:
      return "doubly";
    case Stochastic::row:
      return "row";
    case Stochastic::column:
      return "column";
  }
  return "unknown";
}

MixingRound::MixingRound(const RoundSpec& spec, int size, Stochastic kind, const std::string& where) : self_(size) {
  Builder builder(size, where);
  check_form(builder, spec);
  if (spec.groups.empty()) {
    add_links(builder, spec, size);
    add_edges(builder, spec, size);
    check_covered(builder, spec, size);
  } else {
    add_groups(builder, spec, size);
  }
  builder.finish(sources_, targets_);

  std::vector<double> into(size), out_of(size);
  for (int to = 0; to < size; ++to) {
    for (const auto& [from, weight] : sources_[to]) {
      into[to] += weight;
      out_of[from] += weight;
    }
  }
  const auto check = [&](const char* direction, int rank, double sum) {
    if (std::abs(sum - 1) <= tolerance) return;
    builder.fail(fmt::format("the weights {} rank {} sum to {:.10g} instead of 1", direction, rank, sum));
  };
  for (int rank = 0; rank < size; ++rank) {
    const double others = kind == Stochastic::column ? out_of[rank] : into[rank];
    const double own = spec.self.empty() ? std::max(0.0, 1 - others) : spec.self[rank];
    if (kind != Stochastic::column) check("into", rank, into[rank] + own);
    if (kind != Stochastic::row) check("out of", rank, out_of[rank] + own);
    self_[rank] = std::clamp(1 - others, 0.0, 1.0);
  }
}

}  // namespace shoal
