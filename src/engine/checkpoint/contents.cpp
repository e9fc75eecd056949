#include "engine/checkpoint/contents.h"

#include <ATen/Context.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <algorithm>
#include <charconv>
#include <functional>
#include <iterator>
#include <numeric>
#include <optional>

#include "engine/changes/changed_values.h"
#include "engine/checkpoint/equal_values.h"
#include "engine/checkpoint/names.h"
#include "engine/checkpoint/options.h"
#include "memory/views.h"
#include "optim/named_options.h"
#include "optim/state.h"
#include "shoal/error.h"

namespace shoal {

namespace names = checkpoint_names;
using Json = nlohmann::json;

std::vector<int64_t> memory_order(const at::Tensor& parameter) {
  if (parameter.is_contiguous()) return {};
  const auto strides = dense_strides(parameter);
  std::vector<int64_t> order(parameter.dim());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return strides[a] > strides[b]; });
  const bool row_major = std::is_sorted(order.begin(), order.end());
  return row_major ? std::vector<int64_t>() : order;
}

namespace {

class Collector {
 public:
  Collector(CheckpointSource& source, const Group& group, CheckpointContents& contents)
      : peers_(source.peers()), group_(group), contents_(contents) {}

  void add(const CheckpointView& view) {
    for (const auto& share : view.shares) {
      for (const auto& piece : share.pieces) {
        add_piece(share, piece, share.everywhere && view.own.contains(piece.name));
      }
    }
    add_frozen(view);
    for (const auto& slice : view.buffers) add_own(slice.name, slice.values, slice.part);
    if (!numbers_.empty()) contents_.rank_state[names::numbers] = std::move(numbers_);
    contents_.global_state[names::trained] = trained_;
  }

  // Adds a tensor under a name of this rank.
  void add_of_rank(const std::string& name, const at::Tensor& tensor) {
    contents_.slices.push_back(whole_slice(names::of_rank(group_.rank(), name), tensor, names::ranks_part));
  }

 private:
  // own: each rank has values and state of its own, and rank 0's get the common name, too.
  void add_piece(const CheckpointView::Share& share, const StatePiece& piece, bool own) {
    if (trained_.empty() || trained_.back() != piece.name) trained_.push_back(piece.name);
    if (piece.parameter.numel() == 0) {
      contents_.slices.push_back(whole_slice(piece.name, piece.parameter.detach()));
      return;
    }
    if (piece.owner != share.rank || !piece.updated.defined()) return;
    if (peers_ || own) add_of_rank(piece.name, piece.values());
    if (peers_ && !own) {
      add_mean(piece);
    } else if (!own || group_.rank() == 0) {
      add_slice(piece, piece.name, piece.values(), "model");
    }
    if (share.local == nullptr) return;
    const auto found = share.local->state().find(piece.updated.unsafeGetTensorImpl());
    if (found == share.local->state().end()) return;
    const auto state = named_state(*found->second);
    const bool first = own ? group_.rank() == 0 : !peers_ || peers_->rank() == 0;
    for (const auto& [field, tensor] : state.tensors) {
      const auto name = names::state_tensor(piece.name, field);
      if (first) {
        add_slice(piece, name, tensor, names::optimizer_part);
      } else {
        add_of_rank(name, tensor.detach());
      }
    }
    const bool told = share.everywhere && group_.rank() > 0 && !own && !peers_;
    const bool tells = piece.range.begin == 0 || peers_;
    if (!tells || told) return;
    for (const auto& [field, number] : state.numbers) numbers_[piece.name][field] = json_number(number);
  }

  void add_frozen(const CheckpointView& view) {
    std::vector<const NamedSlice*> among_peers;
    std::vector<const NamedSlice*> among_all;
    for (const auto& slice : view.rest) {
      if (slice.values.numel() == 0) {
        contents_.slices.push_back(slice);
      } else if (view.frozen_may_differ || view.own.contains(slice.name)) {
        among_all.push_back(&slice);
      } else if (peers_) {
        among_peers.push_back(&slice);
      } else {
        contents_.slices.push_back(slice);
      }
    }
    if (peers_) add_where_different(*peers_, among_peers);
    add_where_different(group_, among_all);
  }

  // Slices that all of these ranks have; where values differ, the first rank's get the common name.
  void add_where_different(const Group& among, const std::vector<const NamedSlice*>& slices) {
    if (slices.empty()) return;
    std::vector<int64_t> digests;
    for (const auto* slice : slices) digests.push_back(static_cast<int64_t>(digest_of(slice->values)));
    const auto count = static_cast<int64_t>(digests.size());
    auto all = at::empty({among.size() * count}, at::kLong);
    among.all_gather(all, at::tensor(digests, at::kLong), {-1, -1, "digests of frozen parameters"}).wait();
    const auto rows = all.view({among.size(), count});
    const auto differs = rows.ne(rows[0]).any(0);
    for (int64_t i = 0; i < count; ++i) {
      const auto& slice = *slices[static_cast<size_t>(i)];
      if (among.rank() > 0 && differs[i].item<bool>()) {
        add_of_rank(slice.name, slice.values);
      } else {
        contents_.slices.push_back(slice);
      }
    }
  }

  void add_slice(const StatePiece& piece, std::string name, const at::Tensor& values, const char* part) {
    if (piece.whole()) {
      contents_.slices.push_back(whole_slice(std::move(name), values, part));
      return;
    }
    contents_.slices.push_back({.name = std::move(name),
                                .shape = piece.parameter.sizes().vec(),
                                .range = piece.range,
                                .values = values,
                                .order = memory_order(piece.parameter),
                                .part = part});
  }

  // Adds a tensor of which every rank has its own; rank 0's gets the common name.
  void add_own(const std::string& name, const at::Tensor& tensor, const std::string& part) {
    if (group_.rank() == 0) {
      contents_.slices.push_back(whole_slice(name, tensor.detach(), part));
    } else {
      add_of_rank(name, tensor.detach());
    }
  }

  // Adds this rank's part of the mean over the peers, which is exact if they are equal.
  void add_mean(const StatePiece& piece) {
    auto mean = piece.values().to(at::kDouble, /*non_blocking=*/false, /*copy=*/true).contiguous();
    peers_->all_reduce(mean, ReduceOp::avg, {-1, -1, "mean of " + piece.name}).wait();
    const auto numel = mean.numel();
    const Range own{numel * peers_->rank() / peers_->size(), numel * (peers_->rank() + 1) / peers_->size()};
    const auto values = mean.view({-1}).narrow(0, own.begin, own.size());
    contents_.slices.push_back({.name = piece.name,
                                .shape = piece.parameter.sizes().vec(),
                                .range = {piece.range.begin + own.begin, piece.range.begin + own.end},
                                .values = values.to(piece.updated.scalar_type(), /*non_blocking=*/false, /*copy=*/true),
                                .order = piece.whole() ? std::vector<int64_t>() : memory_order(piece.parameter)});
  }

  std::optional<Group> peers_;
  const Group& group_;
  CheckpointContents& contents_;
  Json numbers_ = Json::object();
  std::vector<std::string> trained_;
};

Json to_json(const GradScaler& scaler) {
  const auto state = scaler.state();
  return {{"scale", state.scale}, {"good_steps", state.good_steps}, {"hysteresis_left", state.hysteresis_left}};
}

// Steps of the strategy's own schedules, which share one position, or else of the first companion.
Json position_of(const CheckpointView& view, const Companions& companions) {
  if (!view.schedules.empty()) return steps_of(*view.schedules.front());
  for (const auto& schedule : companions.schedules) {
    if (auto* const* counting = std::get_if<torch::optim::LRScheduler*>(&schedule)) return steps_of(**counting);
  }
  return nullptr;
}

std::vector<std::pair<std::string, at::Tensor>> random_states(const CheckpointView& view) {
  std::vector<std::pair<std::string, at::Tensor>> list;
  for (const auto& device : devices_of(view)) {
    auto generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock(generator.mutex());
    list.emplace_back(random_name(device), generator.get_state());
  }
  return list;
}

}  // namespace

namespace {

constexpr const char* hex = "hex";

}  // namespace

std::vector<at::Device> devices_of(const CheckpointView& view) {
  std::vector<at::Device> devices{at::kCPU};
  for (const auto& share : view.shares) {
    if (share.pieces.empty() || share.pieces.front().parameter.is_cpu()) continue;
    devices.push_back(share.pieces.front().parameter.device());
    break;
  }
  return devices;
}

std::string random_name(const at::Device& device) {
  return "random." + c10::DeviceTypeName(device.type(), /*lower_case=*/true);
}

Json stored_position(const std::string& position) {
  try {
    static_cast<void>(Json(position).dump());
    return position;
  } catch (const Json::type_error&) {  // bytes that are no UTF-8
    std::string digits;
    for (const unsigned char byte : position) fmt::format_to(std::back_inserter(digits), "{:02x}", byte);
    return {{hex, digits}};
  }
}

std::string read_position(const Json& stored) {
  if (stored.is_string()) return stored.get<std::string>();
  const auto wrong = [] { throw CheckpointError("the position in a rank's state was not written by shoal"); };
  if (!stored.is_object() || !stored.contains(hex) || !stored[hex].is_string()) wrong();
  const auto& digits = stored[hex].get_ref<const std::string&>();
  std::string bytes;
  for (size_t i = 0; i + 1 < digits.size(); i += 2) {
    unsigned byte = 0;
    const auto* end = digits.data() + i + 2;
    if (std::from_chars(digits.data() + i, end, byte, 16).ptr != end) wrong();
    bytes.push_back(static_cast<char>(byte));
  }
  if (digits.size() % 2 != 0) wrong();
  return bytes;
}

namespace {

// What a wrapper ignores is each rank's own affair. Ranks that have tensors of other names, kinds or shapes there save
// one set.
void keep_own_where_alike(CheckpointView& view, const Group& group) {
  std::string text;
  const auto add = [&](const char* kind, const std::string& name, at::IntArrayRef sizes) {
    if (view.own.contains(name)) text += fmt::format("{} {} [{}]\n", kind, name, fmt::join(sizes, ", "));
  };
  for (const auto& share : view.shares) {
    for (const auto& piece : share.pieces) add("trained", piece.name, piece.parameter.sizes());
  }
  for (const auto& slice : view.rest) add("frozen", slice.name, slice.shape);
  const auto own = static_cast<double>(std::hash<std::string>()(text) >> 11);  // as many bits as a double has
  const auto ends = group.all_reduce({own, -own}, ReduceOp::max, {-1, -1, "names of ignored parameters"});
  if (ends[0] != -ends[1]) view.own.clear();
}

}  // namespace

CheckpointContents contents_of(CheckpointSource& source, const Group& group, const Companions& companions,
                               const SaveOptions& options) {
  const torch::NoGradGuard no_grad;
  CheckpointContents contents{.step = options.step, .strategy = source.strategy(), .slices = {}};
  source.begin_save();
  auto view = source.view();
  if (!source.peers()) require_equal_values(view, group);
  keep_own_where_alike(view, group);
  Collector collector(source, group, contents);
  collector.add(view);
  for (const auto& [name, state] : random_states(view)) collector.add_of_rank(name, state);

  auto [own, common] = source.carried();
  if (!own.values.is_null()) contents.rank_state[names::carried] = std::move(own.values);
  if (!common.values.is_null()) contents.global_state[names::carried] = std::move(common.values);
  for (const auto& [name, tensor] : own.tensors) collector.add_of_rank(names::carried_tensor(name), tensor);
  for (const auto& [name, tensor] : common.tensors) {
    contents.slices.push_back(whole_slice(names::carried_tensor(name), tensor.detach(), names::strategy_part));
  }
  if (!options.position.empty()) contents.rank_state[names::position] = stored_position(options.position);
  // Decentralised ranks have state of their own.
  auto& shared = source.peers() ? contents.rank_state : contents.global_state;
  const auto* scaler = view.scaler != nullptr ? view.scaler : companions.scaler;
  if (scaler != nullptr) shared[names::scaler] = to_json(*scaler);
  if (auto groups = stored_options(view); !groups.is_null()) shared[names::param_groups] = std::move(groups);
  if (const auto steps = position_of(view, companions); !steps.is_null()) {
    contents.global_state[names::schedule] = steps;
  }
  for (const auto& schedule : companions.schedules) shared[names::schedules].push_back(state_of(schedule));
  return contents;
}

}  // namespace shoal
