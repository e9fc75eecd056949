#include "strategy/decentralized/training_progress.h"

#include <algorithm>

namespace shoal {

using Json = nlohmann::json;
using State = DecentralizedDataParallelCore::State;

namespace {

Json to_json(const CommonScale::Recent& recent) {
  const auto& before = recent.before;
  Json steps = Json::array();
  for (const auto& step : recent.steps) steps.push_back({step.version, step.overflowed});
  return {{"before", {before.scale, before.good_steps, before.hysteresis_left}}, {"steps", std::move(steps)}};
}

CommonScale::Recent parse_recent(const Json& text) {
  const auto& before = text.at("before");
  CommonScale::Recent recent{
      .before = {.scale = before.at(0), .good_steps = before.at(1), .hysteresis_left = before.at(2)}};
  for (const auto& step : text.at("steps")) recent.steps.push_back({step.at(0), step.at(1)});
  return recent;
}

}  // namespace

Json to_json(const State& state) {
  Json order = Json::array();
  for (const auto& bucket : state.buckets) {
    for (const auto& member : bucket.members()) order.push_back(member.name);
  }
  Json known = Json::array();
  for (const auto& entry : state.mixing.known().entries()) {
    known.push_back({entry.version, entry.weight, entry.overflowed});
  }
  Json members = Json::array();
  for (const auto& bucket : state.buckets) members.push_back(bucket.members().size());
  Json text{{"order", std::move(order)},         {"arrivals", state.expected},  {"step", state.step},
            {"version", state.mixing.version()}, {"mass", state.mixing.mass()}, {"members", std::move(members)},
            {"known", std::move(known)}};
  if (state.scale) text["scale"] = to_json(state.scale->recent());
  return text;
}

TrainingProgress parse_progress(const State& state, const Json& text) {
  TrainingProgress progress{
      .arrivals = text.at("arrivals"), .step = text.at("step"), .version = text.at("version"), .mass = text.at("mass")};
  if (const auto known = text.find("known"); known != text.end()) {
    for (const auto& entry : *known) progress.known.push_back({entry.at(0), entry.at(1), entry.at(2)});
  }
  // Checkpoints written before these were saved lack them.
  if (text.contains("members")) progress.members = text["members"].get<std::vector<size_t>>();
  if (text.contains("scale")) progress.scale = parse_recent(text["scale"]);
  for (const auto& name : text.at("order").get<std::vector<std::string>>()) {
    const auto& all = state.gradients;
    const auto found = std::find_if(all.begin(), all.end(), [&](const auto& one) { return one.name == name; });
    const auto place = static_cast<size_t>(found - all.begin());
    if (found != all.end() && std::count(progress.order.begin(), progress.order.end(), place) == 0) {
      progress.order.push_back(place);
    }
  }
  return progress;
}

}  // namespace shoal
