#include "engine/checkpoint/reducers.h"

#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>
#include <numeric>
#include <optional>

#include "checkpoint/on_all_ranks.h"
#include "shoal/error.h"

namespace shoal {
namespace {

using Json = nlohmann::json;

constexpr const char* hook_entry = "hook";
constexpr const char* orders_entry = "orders";
constexpr const char* hook_prefix = "hook.";

// Reducers of a model share one hook, if any.
CommunicationHook* hook_of(const std::vector<Reducer*>& reducers) {
  return reducers.empty() ? nullptr : reducers.front()->reduction().hook();
}

using LearntOrder = std::optional<BucketOrder::Learnt>;

// None for an order of other gradients, as where other parameters are frozen: it is learnt anew.
LearntOrder parsed_order(const Json& json, size_t gradients) {
  if (json.is_null()) return std::nullopt;
  BucketOrder::Learnt learnt{.order = json.at("order"), .from = json.at("from")};
  auto sorted = learnt.order;
  std::sort(sorted.begin(), sorted.end());
  const bool good =
      sorted.empty() || (sorted.back() < gradients && std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end());
  return good && learnt.from >= 0 ? LearntOrder(std::move(learnt)) : std::nullopt;
}

std::vector<LearntOrder> parsed_orders(const std::vector<Reducer*>& reducers, const Carried& past) {
  try {
    const auto& list = past.values.at(orders_entry);
    std::vector<LearntOrder> orders;
    for (size_t i = 0; i < reducers.size(); ++i) {
      orders.push_back(parsed_order(list.at(i), reducers[i]->gradients().size()));
    }
    return orders;
  } catch (const Json::exception&) {  // a file's content is not trusted
    throw CheckpointError(fmt::format("a rank's state was not written by shoal: {}", past.values.dump()));
  }
}

void restore_hook(CommunicationHook* hook, const Carried& past) {
  const auto entry = past.values.find(hook_entry);
  const auto name = entry != past.values.end() && entry->is_string() ? entry->get<std::string>() : "";
  const std::string here = hook != nullptr ? hook->name() : "";
  if (hook != nullptr) hook->reset();
  if (name != here && !past.values.is_null()) {
    TORCH_WARN("checkpoint: the communication hook was '", name, "', here it is '", here, "', and remembers nothing");
  }
  if (hook == nullptr || name != here) return;
  CommunicationHook::State state;
  for (const auto& [key, tensor] : past.tensors) {
    if (key.starts_with(hook_prefix)) state[key.substr(std::string_view(hook_prefix).size())] = tensor;
  }
  hook->load_state(state);
}

}  // namespace

Carried carried_by(const std::vector<Reducer*>& reducers) {
  Carried carried;
  auto orders = Json::array();
  for (const auto* reducer : reducers) {
    const auto learnt = reducer->learnt_order();
    orders.push_back(learnt ? Json{{"order", learnt->order}, {"from", learnt->from}} : Json());
  }
  carried.values[orders_entry] = std::move(orders);
  if (const auto* hook = hook_of(reducers)) {
    carried.values[hook_entry] = hook->name();
    for (const auto& [name, tensor] : hook->state()) carried.tensors[hook_prefix + name] = tensor;
  }
  return carried;
}

void resume_from(const Group& group, const std::vector<Reducer*>& reducers, const Carried& past) {
  std::vector<LearntOrder> orders;
  on_all_ranks(group, "checkpoint", [&] {
    if (!past.values.is_null()) orders = parsed_orders(reducers, past);
    restore_hook(hook_of(reducers), past);
  });
  for (size_t i = 0; i < orders.size(); ++i) reducers[i]->resume_from(orders[i]);
}

}  // namespace shoal
