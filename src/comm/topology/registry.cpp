// Registry of topologies by name.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <deque>
#include <mutex>
#include <numeric>

#include "comm/topology/graphs.h"
#include "comm/topology/size.h"
#include "shoal/error.h"
#include "shoal/topology.h"

namespace shoal {
namespace {

struct Entry {
  std::string name;
  std::string summary;
  TopologyFactory factory;
};

struct Registry {
  std::mutex mutex{};
  std::deque<Entry> entries;
};

template <class Graph>
Entry built_in(const std::string& name, const std::string& summary, Graph graph) {
  return {name, summary, [name, graph](const TopologyRequest& request) {
            return Topology(name, request.size, Stochastic::doubly, graph(request));
          }};
}

template <Rounds graph(int size)>
Rounds of_size(const TopologyRequest& request) {
  return graph(request.size);
}

std::deque<Entry> built_ins() {
  return {
      built_in("complete", "everybody with everybody: exact in every step", of_size<complete>),
      built_in("ring", "pairs of neighbours, alternating", of_size<ring>),
      built_in("one-peer-exp", "one peer at distance 1, 2, 4, ..: exact after log2 n steps for n = 2^k",
               of_size<one_peer_exp>),
      built_in("alternating-exp-ring", "hosts average inside and, at distance 1, 2, 4, .., in pairs",
               [](const TopologyRequest& request) { return alternating_exp_ring(request.hosts); }),
      built_in("base-2", "one peer, exact after at most 2 log2 n + 1 steps for any n", of_size<base_2>),
      built_in("exp", "all peers at distance 1, 2, 4, ..", of_size<exponential>),
      built_in("hypercube", "the peers whose number differs in one bit", of_size<hypercube>),
      built_in("torus", "neighbours in a closed lattice as square as n allows", of_size<torus>),
      built_in("grid", "neighbours in an open lattice as square as n allows", of_size<grid>),
      built_in("star", "everybody with rank 0", of_size<star>),
      built_in("random", "random pairs from a seed, 64 rounds",
               [](const TopologyRequest& request) { return random_matchings(request.size, request.seed); }),
  };
}

Registry& registry() {
  static Registry instance{.entries = built_ins()};
  return instance;
}

TopologyFactory find(const std::string& name) {
  auto& known = registry();
  const std::lock_guard lock(known.mutex);
  std::vector<std::string> names;
  for (const auto& entry : known.entries) {
    if (entry.name == name) return entry.factory;
    names.push_back(entry.name);
  }
  throw UsageError(fmt::format("unknown topology '{}': choose one of {}", name, fmt::join(names, ", ")));
}

}  // namespace

void register_topology(const std::string& name, TopologyFactory factory, const std::string& summary) {
  if (name.empty() || !factory) throw UsageError("register_topology: give a name and a factory");
  auto& known = registry();
  const std::lock_guard lock(known.mutex);
  for (const auto& entry : known.entries) {
    if (entry.name == name) throw UsageError(fmt::format("register_topology: the name '{}' is taken", name));
  }
  known.entries.push_back({name, summary, std::move(factory)});
}

std::vector<std::pair<std::string, std::string>> known_topologies() {
  auto& known = registry();
  const std::lock_guard lock(known.mutex);
  std::vector<std::pair<std::string, std::string>> list;
  for (const auto& entry : known.entries) list.emplace_back(entry.name, entry.summary);
  return list;
}

Topology make_topology(const std::string& name, const TopologyRequest& wanted) {
  auto request = wanted;
  const auto factory = find(name);
  require_topology_size(name, request.size);
  if (request.hosts.empty()) request.hosts.assign(request.size, 1);
  const bool hosts_fit = std::accumulate(request.hosts.begin(), request.hosts.end(), 0) == request.size &&
                         std::all_of(request.hosts.begin(), request.hosts.end(), [](int count) { return count > 0; });
  if (!hosts_fit) {
    throw UsageError(fmt::format("topology {}: hosts of {} ranks do not make {}", name, fmt::join(request.hosts, ", "),
                                 request.size));
  }
  auto topology = factory(request);
  if (topology.size() != request.size) {
    throw UsageError(fmt::format("topology {}: its factory created a topology for {} ranks instead of {}", name,
                                 topology.size(), request.size));
  }
  topology.name_ = name;
  topology.request_ = std::move(request);
  return topology;
}

Topology make_topology(const std::string& name, int size, int local_size, uint64_t seed) {
  find(name);  // reports an unknown name before any problem with sizes
  require_topology_size(name, size);
  if (local_size < 1) {
    throw UsageError(fmt::format("topology {}: hosts of {} ranks; give at least 1", name, local_size));
  }
  if (size % local_size != 0) {
    throw UsageError(fmt::format("topology {}: {} ranks cannot be divided into hosts of {}; give a multiple of {}",
                                 name, size, local_size, local_size));
  }
  return make_topology(
      name, {.size = size, .hosts = std::vector<int>(std::max(0, size) / local_size, local_size), .seed = seed});
}

}  // namespace shoal
