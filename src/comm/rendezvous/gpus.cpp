#include "comm/rendezvous/gpus.h"

#include <algorithm>
#include <map>
#include <set>
#include <sstream>

namespace shoal {

bool gpu_for_each_rank(const std::vector<Peer>& peers) {
  struct Host {
    size_t ranks = 0;
    std::set<std::string> gpus;
  };
  std::map<std::string, Host> hosts;
  for (const auto& peer : peers) {
    auto& host = hosts[peer.host];
    ++host.ranks;
    std::istringstream list(peer.gpus);
    for (std::string gpu; std::getline(list, gpu, ',');) host.gpus.insert(gpu);
  }
  return std::all_of(hosts.begin(), hosts.end(),
                     [](const auto& one) { return one.second.gpus.size() >= one.second.ranks; });
}

}  // namespace shoal
