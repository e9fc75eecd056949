#include "engine/checkpoint/reducers.h"

#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

#include "checkpoint/format/crc32.h"
#include "checkpoint/on_all_ranks.h"
#include "shoal/error.h"

namespace shoal {
namespace {

using Json = nlohmann::json;

constexpr const char* hook_entry = "hook";
constexpr const char* orders_entry = "orders";
constexpr const char* hook_prefix = "hook.";
constexpr const char* parts_entry = "parts";
constexpr const char* norm_entry = "norm";

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

// Checksum of the parts of gradients that a hook sees on this rank. None: it sees whole buckets, whose gradients have
// their parameters' shapes however they are sharded.
std::optional<uint32_t> parts_seen(const std::vector<Reducer*>& reducers) {
  if (hook_of(reducers) == nullptr || !reducers.front()->reduction().plan().hook_point.of_kept) return std::nullopt;
  std::string text;
  for (const auto* reducer : reducers) {
    for (const auto& bucket : reducer->buckets()) {
      for (const auto& slice : bucket.layout().overlapping(bucket.kept_range())) {
        const auto& name = reducer->gradients()[bucket.members()[slice.piece]].name;
        text += fmt::format("{}[{}:{}]\n", name, slice.in_piece.begin, slice.in_piece.end);
      }
    }
  }
  return crc32(text.data(), text.size());
}

// Whether a hook has seen other parts of gradients on some rank. Collective.
bool saw_other_parts(const Group& group, const std::vector<Reducer*>& reducers, const Carried& past) {
  const auto here = parts_seen(reducers);
  if (!here) return false;
  const auto entry = past.values.find(parts_entry);  // older checkpoints have none
  auto other = at::zeros({1}, at::kByte);
  if (entry != past.values.end() && *entry != Json(*here)) other.fill_(1);
  group.all_reduce(other, ReduceOp::max, {-1, -1, "parts of gradients that the hook has seen"}).wait();
  return other.item<uint8_t>() != 0;
}

std::optional<double> parsed_norm(const Carried& past) {
  const auto entry = past.values.find(norm_entry);
  if (entry == past.values.end()) return std::nullopt;
  const auto norm = entry->is_number() ? entry->get<double>() : -1;
  if (!std::isfinite(norm) || norm < 0) {
    throw CheckpointError(fmt::format("a rank's norm of gradients was not written by shoal: {}", entry->dump()));
  }
  return norm;
}

// Returns what could not be restored, one sentence each.
std::vector<std::string> restore_hook(CommunicationHook* hook, const Carried& past, bool fits) {
  const auto entry = past.values.find(hook_entry);
  const auto name = entry != past.values.end() && entry->is_string() ? entry->get<std::string>() : "";
  const std::string here = hook != nullptr ? hook->name() : "";
  if (hook != nullptr) hook->reset();
  if (name != here && !past.values.is_null()) {
    return {fmt::format("the communication hook was '{}', here it is '{}', and remembers nothing",
                        name.empty() ? "none" : name, here.empty() ? "none" : here)};
  }
  if (hook == nullptr || name != here) return {};
  if (!fits) {
    return {
        fmt::format("the communication hook '{}' has seen gradients of other shards (shard_size, shard_by_parameter or "
                    "units differ), and remembers nothing",
                    here)};
  }
  CommunicationHook::State state;
  for (const auto& [key, tensor] : past.tensors) {
    if (key.starts_with(hook_prefix)) state[key.substr(std::string_view(hook_prefix).size())] = tensor;
  }
  hook->load_state(state);
  return {};
}

}  // namespace

Carried carried_by(const std::vector<Reducer*>& reducers) {
  Carried carried;
  auto orders = Json::array();
  for (const auto* reducer : reducers) {
    const auto learnt = reducer->order().learnt();
    orders.push_back(learnt ? Json{{"order", learnt->order}, {"from", learnt->from}} : Json());
  }
  carried.values[orders_entry] = std::move(orders);
  if (const auto* hook = hook_of(reducers)) {
    carried.values[hook_entry] = hook->name();
    for (const auto& [name, tensor] : hook->state()) carried.tensors[hook_prefix + name] = tensor;
  }
  if (const auto parts = parts_seen(reducers)) carried.values[parts_entry] = *parts;
  for (const auto* reducer : reducers) {
    const auto norm = reducer->consumer() != nullptr ? reducer->consumer()->last_norm() : std::nullopt;
    if (norm) carried.values[norm_entry] = *norm;
  }
  return carried;
}

std::vector<std::string> resume_from(const Group& group, const std::vector<Reducer*>& reducers, const Carried& past) {
  const bool fits = !saw_other_parts(group, reducers, past);
  std::vector<LearntOrder> orders;
  std::optional<double> norm;
  std::vector<std::string> differences;
  on_all_ranks(group, "checkpoint", [&] {
    if (!past.values.is_null()) orders = parsed_orders(reducers, past);
    norm = parsed_norm(past);
    differences = restore_hook(hook_of(reducers), past, fits);
  });
  for (size_t i = 0; i < orders.size(); ++i) reducers[i]->resume_from(orders[i]);
  for (auto* reducer : reducers) {
    if (reducer->consumer() != nullptr) reducer->consumer()->resume_from(norm);
  }
  return differences;
}

}  // namespace shoal
