// Rejoining: a new process takes a dead rank's place and gets that rank's state from a neighbour.

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include "comm/group/text.h"
#include "optim/named_options.h"
#include "shoal/error.h"
#include "shoal/group.h"
#include "strategy/decentralized/state.h"
#include "strategy/decentralized/training_progress.h"

namespace shoal {
namespace {

using Json = nlohmann::json;
using State = DecentralizedDataParallelCore::State;

const Label joining{-1, -1, "a rank joins again"};

// Properties that must be equal on both ranks.
Json identity_of(const State& state) {
  return {{"model", state.tensors.describe()},
          {"topology", state.mixing.whole().fingerprint()},
          {"options", describe(state.options)}};
}

// Shapes and numbers as JSON; appends the tensors to `tensors`.
Json describe(const OptimizerState& whole, std::vector<at::Tensor>& tensors) {
  Json text = Json::object();
  for (const auto& [parameter, named] : whole) {
    Json shapes = Json::object();
    for (const auto& [name, tensor] : named.tensors) {
      shapes[name] = {{"dtype", static_cast<int>(tensor.scalar_type())}, {"sizes", tensor.sizes().vec()}};
      tensors.push_back(tensor);
    }
    text[parameter] = {{"numbers", json_numbers(named.numbers)}, {"tensors", std::move(shapes)}};
  }
  return text;
}

// Inverse of describe(), with new tensors, which are appended to `tensors` in describe()'s order.
OptimizerState room_for(const Json& text, std::vector<at::Tensor>& tensors) {
  OptimizerState whole;
  for (const auto& [parameter, named] : text.items()) {
    auto& state = whole[parameter];
    state.numbers = numbers_from(named.at("numbers"));
    for (const auto& [name, shape] : named.at("tensors").items()) {
      state.tensors[name] = at::empty(shape.at("sizes").get<std::vector<int64_t>>(),
                                      static_cast<at::ScalarType>(shape.at("dtype").get<int>()));
      tensors.push_back(state.tensors[name]);
    }
  }
  return whole;
}

std::vector<at::Tensor> tensors_of(const State& state) {
  std::vector<at::Tensor> list;
  for (const auto& entry : state.tensors.parameters) list.push_back(entry.tensor);
  for (const auto& entry : state.tensors.buffers) list.push_back(entry.tensor);
  return list;
}

void require_equal(const Json& own, const Json& theirs, int donor) {
  for (const auto& [what, value] : own.items()) {
    if (theirs.at(what) == value) continue;
    throw DisagreeError(fmt::format(
        "rejoin: the {} of this rank differs from that of rank {}: {} here, {} there; use the same program and options",
        what, donor, value.dump(), theirs.at(what).dump()));
  }
}

}  // namespace

void State::send_state_to(const Group& pair) const {
  const torch::NoGradGuard no_grad;
  OptimizerState whole;
  for (const auto& bucket : buckets) whole.merge(optimizer_state(*bucket.optimizer, *module));
  auto tensors_of_state = tensors_of(*this);
  Json text{
      {"identity", identity_of(*this)}, {"standing", to_json(*this)}, {"state", describe(whole, tensors_of_state)}};
  if (scaler) {
    const auto now = scaler->state();
    text["scaler"] = {now.scale, now.good_steps, now.hysteresis_left};
  }
  broadcast_text(pair, text.dump(), 0, joining);
  auto accepted = at::zeros({1}, at::kInt);
  pair.broadcast(accepted, 1, joining).wait();
  if (accepted.item<int>() != 0) broadcast_coalesced(pair, tensors_of_state, 0, joining);
}

void State::rejoin() {
  const torch::NoGradGuard no_grad;
  const auto pair = mixing.meet_donor();
  const auto text = Json::parse(broadcast_text(pair, "", 0, joining));
  auto accepted = at::ones({1}, at::kInt);
  try {
    require_equal(identity_of(*this), text.at("identity"), pair.world_rank(0));
  } catch (const DisagreeError&) {
    pair.broadcast(accepted.zero_(), 1, joining).wait();
    throw;
  }
  pair.broadcast(accepted, 1, joining).wait();
  auto received = tensors_of(*this);
  pending = room_for(text.at("state"), received);
  pending_dtypes = StateDtypes::kept;
  broadcast_coalesced(pair, received, 0, joining);

  const auto sender = parse_progress(*this, text.at("standing"));
  expected = sender.arrivals;
  if (scaler) {
    const auto& now = text.at("scaler");
    scaler->load({.scale = now[0], .good_steps = now[1], .hysteresis_left = now[2]});
  }
  make_buckets(sender.order);
  const auto version = mixing.arrive(sender.mass);
  mixing.known().load(sender.known);
  weights_told = true;
  // The other ranks go on meanwhile; this rank resumes at their present step.
  step = sender.step + version + 1 - sender.version;
  for (auto& bucket : buckets) {
    for (int64_t done = 0; bucket.schedule && done < step; ++done) bucket.schedule->step();
  }
  publish_all();
  if (scale) {
    scale->resume(sender.scale);
    for (auto missed = sender.version + 1; missed <= mixing.version(); ++missed) scale->step(missed, mixing.known());
  }
  mixing.settle();
}

}  // namespace shoal
