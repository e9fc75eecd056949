#include "shoal/topology.h"

#include <fmt/format.h>

#include <bit>

#include "comm/topology/connected.h"
#include "comm/topology/size.h"
#include "shoal/error.h"
#include "shoal/group.h"

namespace shoal {
namespace {

std::string in_words(Stochastic kind) {
  switch (kind) {
    case Stochastic::doubly:
      return "doubly stochastic";
    case Stochastic::row:
      return "row-stochastic";
    case Stochastic::column:
      return "column-stochastic";
  }
  return "unknown";
}

// FNV-1a over numbers.
class Hash {
 public:
  void add(uint64_t number) {
    for (int byte = 0; byte < 8; ++byte) value_ = (value_ ^ (number >> (8 * byte) & 0xff)) * 0x100000001b3U;
  }
  void add(const MixingRound& round) {
    for (int rank = 0; rank < round.size(); ++rank) {
      add(std::bit_cast<uint64_t>(round.self(rank)));
      add(round.sources(rank).size());
      for (const auto& source : round.sources(rank)) {
        add(static_cast<uint64_t>(source.rank));
        add(std::bit_cast<uint64_t>(source.weight));
      }
    }
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xcbf29ce484222325U;
};

int64_t edges_of(const RoundSpec& round) {
  auto edges = static_cast<int64_t>(2 * round.links.size() + round.edges.size());
  for (const auto& group : round.groups) edges += static_cast<int64_t>(group.size() * (group.size() - 1));
  return edges;
}

std::string shape(const Topology& topology) {
  return fmt::format("{}, {} rank{}, {}, {} round{}", topology.name(), topology.size(), topology.size() > 1 ? "s" : "",
                     in_words(topology.kind()), topology.period(), topology.period() > 1 ? "s" : "");
}

}  // namespace

void require_topology_size(const std::string& name, int size) {
  if (size < 1) throw UsageError(fmt::format("topology {}: {} ranks; give at least 1", name, size));
  if (size <= max_topology_ranks) return;
  throw UsageError(fmt::format("topology {}: {} ranks; at most {} are possible", name, size, max_topology_ranks));
}

Topology::Topology(std::string name, int size, Stochastic kind, const std::vector<RoundSpec>& rounds)
    : name_(std::move(name)), size_(size), kind_(kind) {
  const auto where = fmt::format("topology {}", name_);
  require_topology_size(name_, size);
  if (rounds.empty()) throw UsageError(where + ": it has no rounds");
  if (static_cast<int64_t>(rounds.size()) > max_topology_rounds) {
    throw UsageError(fmt::format("{}: {} rounds; at most {} are possible", where, rounds.size(), max_topology_rounds));
  }
  int64_t edges = 0;
  for (const auto& round : rounds) edges += edges_of(round);
  if (edges > max_topology_edges) {
    throw UsageError(fmt::format("{}: {} edges; at most {} are possible", where, edges, max_topology_edges));
  }
  auto proven = std::make_shared<std::vector<MixingRound>>();
  proven->reserve(rounds.size());
  for (size_t i = 0; i < rounds.size(); ++i) {
    proven->emplace_back(rounds[i], size, kind, fmt::format("{}, round {}", where, i));
  }
  prove_connected(*proven, where);
  rounds_ = std::move(proven);
}

const MixingRound& Topology::round(int64_t index) const {
  if (index < 0)
    throw UsageError(fmt::format("topology {}: round {} does not exist; rounds count from 0", name_, index));
  return (*rounds_)[static_cast<size_t>(index % period())];
}

std::string Topology::fingerprint() const {
  Hash hash;
  for (const auto& round : *rounds_) hash.add(round);
  return fmt::format("{}, {:016x}", shape(*this), hash.value());
}

void agree(const Group& group, const Topology& topology) {
  std::vector<std::string> items{shape(topology)};
  for (int64_t index = 0; index < topology.period(); ++index) {
    Hash hash;
    hash.add(topology.round(index));
    items.push_back(fmt::format("round {} with weights {:016x}", index, hash.value()));
  }
  agree(group, "topology", items);
  if (topology.size() == group.size()) return;
  throw UsageError(
      fmt::format("topology {} is for {} ranks; the group has {}", topology.name(), topology.size(), group.size()));
}

}  // namespace shoal
