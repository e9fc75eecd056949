#include "elastic/admission.h"

#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "comm/group/text.h"
#include "optim/named_options.h"
#include "shoal/error.h"
#include "shoal/precision.h"

namespace shoal {
namespace {

using Json = nlohmann::json;

constexpr const char* cannot_give = "!";  // before the reason, in place of the state

void send_to(const Group& group, int to, const at::Tensor& tensor) {
  if (tensor.numel() == 0) return;
  group.send(tensor.detach().cpu().contiguous().view({-1}), to, 0, {-1, -1, "state for a newcomer"}).wait();
}

void receive(const Group& group, int from, const at::Tensor& tensor) {
  if (tensor.numel() == 0) return;
  auto values = at::empty({tensor.numel()}, at::TensorOptions(tensor.scalar_type()));
  group.recv(values, from, 0, {-1, -1, "state for a newcomer"}).wait();
  at::Tensor(tensor.detach()).copy_(values.view(tensor.sizes()));
}

Json json_of(const GradScaler& scaler) {
  const auto state = scaler.state();
  return {state.scale, state.good_steps, state.hysteresis_left};
}

void load(GradScaler& scaler, const Json& state) {
  scaler.load({state.at(0), state.at(1), state.at(2)});
}

}  // namespace

Admission::Admission(ElasticParts& parts, const JoinTerms& terms, const ElasticOptions& options, GlobalBatch& batch)
    : parts_(parts), terms_(terms), options_(options), batch_(batch) {}

std::vector<size_t> Admission::learnt_order() const {
  const auto* reducer = parts_.reducer();
  const auto learnt = reducer != nullptr ? reducer->order().learnt() : std::nullopt;
  return learnt ? learnt->order : std::vector<size_t>();
}

// For the next regroup. The gradients of sharded strategies have a fixed order, and so none that was learnt.
void Admission::follow_order(const std::vector<size_t>& order) const {
  if (order.empty() && learnt_order().empty()) return;
  using Learnt = BucketOrder::Learnt;
  parts_.reducer()->resume_from(order.empty() ? std::nullopt : std::optional(Learnt{order, 0}));
}

// Everything but the values of tensors.
std::string Admission::state_text(const Position& position, bool with_shards) const {
  Json json;
  json["terms"] = terms_.text();
  json["done"] = position.done;
  json["changes"] = position.changes;
  json["steps_before"] = position.steps_before;
  json["taken"] = position.taken;
  json["pass"] = position.pass;
  json["passes_over"] = position.passes_over;
  json["names_epochs"] = position.names_epochs;
  json["inside"] = position.epoch.has_value();
  json["epoch"] = position.epoch.value_or(position.next_epoch);
  json["batch"] = {{"size", batch_.size()}, {"shares", batch_.first_shares()}, {"seed", batch_.first_seed()}};
  json["order"] = learnt_order();
  for (const auto& group : parts_.optimizer().param_groups()) {
    json["options"].push_back(named_options(group.options()));
  }
  if (const auto* scaler = terms_.scaler()) json["scaler"] = json_of(*scaler);
  if (const auto* scaler = parts_.own_scaler()) json["own_scaler"] = json_of(*scaler);
  if (with_shards) {
    auto& states = json["state"] = Json::array();
    parts_.visit_state([&](const std::string& name, const NamedState& state) {
      Json one{{"name", name}, {"numbers", json_numbers(state.numbers)}, {"tensors", Json::object()}};
      for (const auto& [field, tensor] : state.tensors) {
        one["tensors"][field] = {static_cast<int>(tensor.scalar_type()), tensor.sizes().vec()};
      }
      states.push_back(std::move(one));
    });
  }
  if (options_.save_state) json["program"] = options_.save_state();
  return json.dump();
}

std::vector<at::Tensor> Admission::plain_tensors(bool with_shards) const {
  std::vector<at::Tensor> list;
  const auto tensors = parts_.tensors();
  for (const auto& entry : tensors.buffers) list.push_back(entry.tensor);
  std::set<const c10::TensorImpl*> divided;
  if (!with_shards) {
    for (const auto& parameter : parts_.divided()) divided.insert(parameter.unsafeGetTensorImpl());
  }
  for (const auto& entry : tensors.parameters) {
    if (!divided.contains(entry.tensor.unsafeGetTensorImpl())) list.push_back(entry.tensor);
  }
  if (with_shards) {
    const auto copies = parts_.frozen_copies();
    list.insert(list.end(), copies.begin(), copies.end());
  }
  list.insert(list.end(), options_.tensors.begin(), options_.tensors.end());
  return list;
}

void Admission::take_state(const Json& states, const Group& group, int from) const {
  OptimizerState whole;
  for (const auto& one : states) {  // in the order in which they are sent
    auto& state = whole[one.at("name").get<std::string>()];
    state.numbers = numbers_from(one.at("numbers"));
    for (const auto& [field, like] : one.at("tensors").items()) {
      const auto dtype = static_cast<at::ScalarType>(like.at(0).get<int>());
      auto values = at::empty(like.at(1).get<std::vector<int64_t>>(), at::TensorOptions(dtype));
      receive(group, from, values);
      state.tensors[field] = values;
    }
  }
  parts_.take_state(whole);
}

void Admission::take(const std::string& text, const Group& group, int from, Position& position) const {
  const auto json = Json::parse(text);
  terms_.require_alike(json.at("terms").get<std::string>());
  const bool with_shards = json.contains("state");
  for (const auto& tensor : plain_tensors(with_shards)) receive(group, from, tensor);
  with_shards ? take_state(json.at("state"), group, from) : parts_.come_without_shards();
  auto& groups = parts_.optimizer().param_groups();
  for (size_t i = 0; i < groups.size(); ++i) set_options(groups[i].options(), json.at("options").at(i));
  if (auto* scaler = terms_.scaler()) load(*scaler, json.at("scaler"));
  if (auto* scaler = parts_.own_scaler()) load(*scaler, json.at("own_scaler"));
  if (options_.load_state) options_.load_state(json.at("program").get<std::string>());
  const auto& batch = json.at("batch");
  batch_.adopt(batch.at("size"), batch.at("shares"), batch.at("seed"));
  follow_order(json.at("order").get<std::vector<size_t>>());
  position.done = json.at("done");
  position.changes = json.at("changes");
  position.steps_before = json.at("steps_before");
  position.taken = json.at("taken");
  position.next_epoch = json.at("epoch");
  position.pass = json.at("pass");
  position.passes_over = json.at("passes_over");
  position.names_epochs = json.at("names_epochs");
  position.epoch.reset();
  if (json.at("inside").get<bool>()) position.epoch = position.next_epoch;
}

void Admission::share(const Group& group, const std::vector<bool>& newcomers, Position& position) const {
  const torch::NoGradGuard no_grad;
  const auto rank = static_cast<size_t>(group.rank());
  // A newcomer that has been long in coming may have a lower number than all members.
  const auto giver = static_cast<size_t>(std::find(newcomers.begin(), newcomers.end(), false) - newcomers.begin());
  const int from = static_cast<int>(giver);
  const bool with_shards = !parts_.gives_shards(group);
  std::string own;
  if (rank == giver) {
    try {
      own = state_text(position, with_shards);
    } catch (const std::exception& error) {  // which must not cost the job
      own = cannot_give + std::string(error.what());
      if (options_.save_state && !with_shards)
        own += "; save_state must not read parameters, whose shards are on all ranks";
    }
  }
  const auto text = broadcast_text(group, own, from, {-1, -1, "state for a newcomer"});
  if (text.starts_with(cannot_give)) {
    if (newcomers[rank]) throw UsageError("Elastic: the job has no state to give: " + text.substr(1));
    throw CommError("the state cannot be given: " + text.substr(1));
  }
  if (newcomers[rank]) {
    take(text, group, from, position);
  } else {
    // All ranks go on with the order of one, as after a death.
    follow_order(Json::parse(text).at("order").get<std::vector<size_t>>());
  }
  if (rank == giver) {
    const auto send = [&](const at::Tensor& tensor) {
      for (size_t to = 0; to < newcomers.size(); ++to) {
        if (newcomers[to]) send_to(group, static_cast<int>(to), tensor);
      }
    };
    for (const auto& tensor : plain_tensors(with_shards)) send(tensor);
    if (with_shards) {
      parts_.visit_state([&](const std::string&, const NamedState& state) {
        for (const auto& [field, tensor] : state.tensors) send(tensor);
      });
    }
  }
  parts_.give_rest(group, newcomers);
  // Whoever fails with the state has told the others by now.
  group.all_reduce(std::vector<double>{1.0}, ReduceOp::sum, {-1, -1, "all ranks have the state"});
}

}  // namespace shoal
