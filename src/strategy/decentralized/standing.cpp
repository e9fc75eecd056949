#include "strategy/decentralized/standing.h"

#include <algorithm>

namespace shoal {

using Json = nlohmann::json;
using State = DecentralizedDataParallelCore::State;

Json to_json(const State& state) {
  Json order = Json::array();
  for (const auto& bucket : state.buckets) {
    for (const auto& member : bucket.members()) order.push_back(member.name);
  }
  Json known = Json::array();
  for (const auto& entry : state.mixing.known().entries()) {
    known.push_back({entry.version, entry.weight, entry.overflowed});
  }
  return {{"order", std::move(order)},         {"arrivals", state.expected},  {"step", state.step},
          {"version", state.mixing.version()}, {"mass", state.mixing.mass()}, {"known", std::move(known)}};
}

Standing parse_standing(const State& state, const Json& text) {
  Standing standing{
      .arrivals = text.at("arrivals"), .step = text.at("step"), .version = text.at("version"), .mass = text.at("mass")};
  if (const auto known = text.find("known"); known != text.end()) {
    for (const auto& entry : *known) standing.known.push_back({entry.at(0), entry.at(1), entry.at(2)});
  }
  for (const auto& name : text.at("order").get<std::vector<std::string>>()) {
    const auto& all = state.gradients;
    const auto found = std::find_if(all.begin(), all.end(), [&](const auto& one) { return one.name == name; });
    const auto place = static_cast<size_t>(found - all.begin());
    if (found != all.end() && std::count(standing.order.begin(), standing.order.end(), place) == 0) {
      standing.order.push_back(place);
    }
  }
  return standing;
}

}  // namespace shoal
