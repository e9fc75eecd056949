#include "comm/rendezvous/gpus.h"

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <sstream>

namespace shoal {
namespace {

using Gpus = std::set<std::string>;

Gpus gpus_of(const Peer& peer) {
  Gpus list;
  std::istringstream names(peer.gpus);
  for (std::string name; std::getline(names, name, ',');) list.insert(name);
  return list;
}

// Whether each rank can have one of the GPUs that it sees for itself, by augmenting paths.
bool can_be_divided(const std::vector<Gpus>& seen_by) {
  std::map<std::string, size_t> owner;
  for (size_t rank = 0; rank < seen_by.size(); ++rank) {
    Gpus tried;
    const std::function<bool(size_t)> find = [&](size_t of) {
      return std::any_of(seen_by[of].begin(), seen_by[of].end(), [&](const std::string& gpu) {
        if (!tried.insert(gpu).second) return false;
        const auto found = owner.find(gpu);
        if (found != owner.end() && !find(found->second)) return false;
        owner[gpu] = of;
        return true;
      });
    };
    if (!find(rank)) return false;
  }
  return true;
}

}  // namespace

bool gpu_for_each_rank(const std::vector<Peer>& peers) {
  std::map<std::string, std::vector<Gpus>> hosts;
  for (const auto& peer : peers) hosts[peer.host].push_back(gpus_of(peer));
  return std::all_of(hosts.begin(), hosts.end(), [](const auto& host) { return can_be_divided(host.second); });
}

}  // namespace shoal
