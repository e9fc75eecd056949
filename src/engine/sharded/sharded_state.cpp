#include "engine/sharded/sharded_state.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "comm/group/text.h"
#include "comm/store/warn.h"
#include "module/walk.h"
#include "optim/named_options.h"
#include "optim/state.h"
#include "shoal/detail/sharded_optimizer.h"
#include "shoal/error.h"

namespace shoal {
namespace {

using Json = nlohmann::json;

// What the owner keeps of a piece; its tensors as they are.
NamedState own_state(const StatePiece& piece, const torch::optim::Optimizer& local) {
  NamedState named;
  if (!piece.updated.defined()) return named;
  const auto found = local.state().find(piece.updated.unsafeGetTensorImpl());
  if (found != local.state().end()) named = named_state(*found->second);
  if (piece.main) named.tensors[main_param] = piece.values();
  return named;
}

Json describe(const NamedState& named) {
  Json tensors = Json::object();
  for (const auto& [name, tensor] : named.tensors)
    tensors[name] = {{"dtype", static_cast<int>(tensor.scalar_type())}, {"shape", tensor.sizes().vec()}};
  return {{"tensors", tensors}, {"numbers", json_numbers(named.numbers)}};
}

// What the owners keep of all pieces, in their order.
std::vector<Json> describe_all(const Group& group, const std::vector<StatePiece>& pieces,
                               const torch::optim::Optimizer& local) {
  Json own = Json::array();
  for (const auto& piece : pieces) {
    if (piece.owner == group.rank()) own.push_back(describe(own_state(piece, local)));
  }
  const Label label{-1, -1, "optimizer state, by state_dict() or save() on every rank"};
  std::vector<Json> of_ranks;
  for (const auto& text : all_gather_text(group, own.dump(), label)) of_ranks.push_back(Json::parse(text));
  std::vector<size_t> taken(of_ranks.size());
  std::vector<Json> all;
  for (const auto& piece : pieces) {
    const auto owner = static_cast<size_t>(piece.owner);
    all.push_back(std::move(of_ranks[owner].at(taken[owner]++)));
  }
  return all;
}

// A tensor like the parameter whose memory can be filled in the parameter's own order.
at::Tensor like(const at::Tensor& parameter, at::ScalarType dtype) {
  return at::empty_strided(parameter.sizes(), parameter.strides(),
                           parameter.options().dtype(dtype).requires_grad(false));
}

at::Tensor in_memory_order(const at::Tensor& dense) {
  return dense.as_strided({dense.numel()}, {1});
}

// Tensors that are cut like the parameter; others belong to whole ones.
bool follows(const at::Tensor& tensor, const StatePiece& piece) {
  return tensor.numel() == piece.range.size();
}

// Tensors of a piece that are sent beside each other: small ones of one dtype, or a large one.
struct SentTensors {
  struct One {
    std::string name;
    std::vector<int64_t> shape;
  };
  at::ScalarType dtype{};
  std::vector<One> list;
  int64_t numel = 0;
};

// More would take memory for all of them at once, and no less time.
constexpr int64_t most_beside_each_other = 1 << 18;  // elements

std::vector<SentTensors> messages_of(const Json& tensors) {
  std::vector<SentTensors> messages;
  std::map<at::ScalarType, size_t> open;  // the message of a dtype to which tensors may be added
  for (const auto& [name, about] : tensors.items()) {
    const auto dtype = static_cast<at::ScalarType>(about["dtype"].get<int>());
    SentTensors::One one{name, about["shape"].get<std::vector<int64_t>>()};
    const auto numel = c10::multiply_integers(one.shape);
    const auto found = open.find(dtype);
    if (found == open.end() || messages[found->second].numel + numel > most_beside_each_other) {
      open[dtype] = messages.size();
      messages.push_back({.dtype = dtype});
    }
    auto& message = messages[open[dtype]];
    message.list.push_back(std::move(one));
    message.numel += numel;
  }
  return messages;
}

// Views of `memory`, in the order of the list.
std::vector<at::Tensor> parts_of(const at::Tensor& memory, const SentTensors& sent) {
  std::vector<at::Tensor> parts;
  int64_t begin = 0;
  for (const auto& one : sent.list) {
    parts.push_back(memory.narrow(0, begin, c10::multiply_integers(one.shape)).view(one.shape));
    begin += parts.back().numel();
  }
  return parts;
}

// alone: the part has its memory for itself.
void keep_part(const std::string& name, const at::Tensor& part, bool alone, const StatePiece& piece,
               NamedState& whole) {
  auto& tensor = whole.tensors[name];
  if (piece.whole()) {
    tensor = alone ? part : part.clone();
    return;
  }
  if (!tensor.defined()) tensor = like(piece.parameter, part.scalar_type());
  in_memory_order(tensor).narrow(0, piece.range.begin, piece.range.size()).copy_(part.view({-1}));
}

// whole: nullptr where nothing is kept.
void gather_piece(const Group& group, const StatePiece& piece, const Json& about, const NamedState& own,
                  NamedState* whole) {
  const Label label{-1, -1, "optimizer state of " + piece.name + ", by state_dict() or save() on every rank"};
  for (const auto& sent : messages_of(about["tensors"])) {
    const auto memory = at::empty({sent.numel}, piece.parameter.options().dtype(sent.dtype).requires_grad(false));
    auto parts = parts_of(memory, sent);
    for (size_t i = 0; group.rank() == piece.owner && i < parts.size(); ++i) {
      parts[i].copy_(own.tensors.at(sent.list[i].name));
    }
    group.broadcast(memory, piece.owner, label).wait();
    for (size_t i = 0; whole != nullptr && i < parts.size(); ++i) {
      keep_part(sent.list[i].name, parts[i], parts.size() == 1, piece, *whole);
    }
  }
  if (whole != nullptr) whole->numbers = numbers_from(about["numbers"]);
}

void check_names(const std::vector<StatePiece>& pieces, const OptimizerState& state) {
  std::set<std::string> here;
  std::set<std::string> missing;
  for (const auto& piece : pieces) {
    here.insert(piece.name);
    if (state.count(piece.name) == 0) missing.insert(piece.name);
  }
  if (!missing.empty()) {
    throw UsageError(fmt::format("the optimizer state has no entry for parameter {}", fmt::join(missing, ", ")));
  }
  std::set<std::string> extra;
  for (const auto& [name, entry] : state) {
    if (here.count(name) == 0 && name != grad_scaler_key) extra.insert(name);
  }
  if (extra.empty()) return;
  throw UsageError(fmt::format("the optimizer state has an entry for {}, which is not a trainable parameter",
                               fmt::join(extra, ", ")));
}

// None where the state has no scaler's.
std::optional<GradScalerState> scaler_in(const OptimizerState& state) {
  const auto found = state.find(grad_scaler_key);
  if (found == state.end()) return std::nullopt;
  const auto number = [&](const char* name) {
    const auto entry = found->second.numbers.find(name);
    if (entry != found->second.numbers.end()) return entry->second;
    throw UsageError(fmt::format("the optimizer state's loss scaler ({}) has no {}", grad_scaler_key, name));
  };
  return GradScalerState{.scale = number("scale"),
                         .good_steps = static_cast<int64_t>(number("good_steps")),
                         .hysteresis_left = static_cast<int64_t>(number("hysteresis_left"))};
}

void warn_of_scaler(bool there, bool here) {
  if (there && !here) warn("the optimizer state has a loss scaler, but this optimizer has none; it is ignored");
  if (here && !there) warn("the optimizer state has no loss scaler; this optimizer's scaler keeps its state");
}

std::string shape_fault(const std::string& name, const at::Tensor& tensor, const StatePiece& piece) {
  return fmt::format("the optimizer state's {} of parameter {} has shape [{}], the parameter [{}]", name, piece.name,
                     fmt::join(tensor.sizes(), ", "), fmt::join(piece.parameter.sizes(), ", "));
}

// Of the copy of a state tensor that has its parameter's shape.
at::ScalarType dtype_of_copy(const std::string& name, const at::Tensor& tensor, const StatePiece& piece,
                             StateDtypes dtypes) {
  const bool follows_updated = dtypes == StateDtypes::of_parameters && name != main_param &&
                               tensor.is_floating_point() && piece.updated.defined() &&
                               piece.updated.is_floating_point();
  return follows_updated ? piece.updated.scalar_type() : tensor.scalar_type();
}

// The piece's part of a whole state; new tensors.
NamedState cut(const NamedState& whole, const StatePiece& piece, StateDtypes dtypes) {
  NamedState part{.tensors = {}, .numbers = whole.numbers};
  for (const auto& [name, tensor] : whole.tensors) {
    const bool like_parameter = tensor.sizes() == piece.parameter.sizes();
    if (!like_parameter && (name == main_param || !piece.whole() || follows(tensor, piece))) {
      throw UsageError(shape_fault(name, tensor, piece));
    }
    if (!like_parameter) {
      part.tensors[name] = tensor.clone();
      continue;
    }
    auto copy = like(piece.parameter, dtype_of_copy(name, tensor, piece, dtypes));
    copy.copy_(tensor);
    part.tensors[name] =
        piece.whole() ? copy : in_memory_order(copy).narrow(0, piece.range.begin, piece.range.size()).clone();
  }
  return part;
}

}  // namespace

void require_shapes(const std::vector<StatePiece>& pieces, const OptimizerState& state) {
  for (const auto& piece : pieces) {
    const auto found = state.find(piece.name);
    if (found == state.end()) continue;
    for (const auto& [name, tensor] : found->second.tensors) {
      if (tensor.sizes() != piece.parameter.sizes()) throw UsageError(shape_fault(name, tensor, piece));
    }
  }
}

std::vector<StatePiece> pieces_of(const torch::optim::Optimizer& optimizer, const torch::nn::Module& module) {
  std::set<const c10::TensorImpl*> updated;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) updated.insert(parameter.unsafeGetTensorImpl());
  }
  std::vector<StatePiece> pieces;
  for (const auto& entry : walk(module, {}).parameters) {
    if (updated.count(entry.tensor.unsafeGetTensorImpl()) == 0) continue;
    pieces.push_back(
        {.name = entry.name, .parameter = entry.tensor, .range = {0, entry.tensor.numel()}, .updated = entry.tensor});
  }
  return pieces;
}

OptimizerState gather_state(const Group& group, const std::vector<StatePiece>& pieces,
                            const torch::optim::Optimizer& local, std::optional<int> recipient) {
  const torch::NoGradGuard no_grad;
  const bool keep = !recipient || *recipient == group.rank();
  const auto about = describe_all(group, pieces, local);
  OptimizerState state;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const auto& piece = pieces[i];
    const auto own = piece.owner == group.rank() ? own_state(piece, local) : NamedState();
    gather_piece(group, piece, about[i], own, keep ? &state[piece.name] : nullptr);
  }
  return state;
}

NamedState scaler_state(const GradScaler& scaler) {
  const auto state = scaler.state();
  return {.tensors = {},
          .numbers = {{"scale", state.scale},
                      {"good_steps", static_cast<double>(state.good_steps)},
                      {"hysteresis_left", static_cast<double>(state.hysteresis_left)}}};
}

void load_state(int rank, const std::vector<StatePiece>& pieces, torch::optim::Optimizer& local,
                const OptimizerState& state, StateDtypes dtypes, GradScaler* scaler) {
  const torch::NoGradGuard no_grad;
  check_names(pieces, state);
  const auto past_scaler = scaler_in(state);
  std::vector<std::pair<const StatePiece*, at::Tensor>> mains;
  std::vector<std::pair<void*, std::unique_ptr<torch::optim::OptimizerParamState>>> fresh;
  for (const auto& piece : pieces) {
    auto part = cut(state.at(piece.name), piece, dtypes);
    if (piece.owner != rank || !piece.updated.defined()) continue;
    const auto main = part.tensors.extract(main_param);
    if (piece.main && !main.empty()) mains.emplace_back(&piece, main.mapped());
    const bool never_updated = part.tensors.empty() && part.numbers.empty();
    auto* key = piece.updated.unsafeGetTensorImpl();
    fresh.emplace_back(key, never_updated ? nullptr : make_state(local, param_group_of(local, key), part));
  }
  if (scaler && past_scaler) scaler->load(*past_scaler);  // throws before anything has changed
  warn_of_scaler(past_scaler.has_value(), scaler != nullptr);
  for (auto& [key, entry] : fresh) {
    if (entry) {
      local.state()[key] = std::move(entry);
    } else {
      reset_state(local, key);
    }
  }
  for (const auto& [piece, main] : mains) at::Tensor(piece->updated).copy_(main);
}

void refuse_sharded(const torch::optim::Optimizer& optimizer, const std::string& advice) {
  if (dynamic_cast<const ShardedOptimizerBase*>(&optimizer) != nullptr) throw UsageError(advice);
}

OptimizerState optimizer_state(const torch::optim::Optimizer& optimizer, detail::ModuleRef module) {
  refuse_sharded(optimizer,
                 "optimizer_state: of a sharded optimizer, use its own state_dict(), which gathers the state");
  const torch::NoGradGuard no_grad;
  OptimizerState state;
  for (const auto& piece : pieces_of(optimizer, module)) {
    auto& named = state[piece.name] = own_state(piece, optimizer);
    for (auto& [name, tensor] : named.tensors) tensor = tensor.clone();
  }
  return state;
}

void load_optimizer_state(torch::optim::Optimizer& optimizer, detail::ModuleRef module, const OptimizerState& state,
                          StateDtypes dtypes) {
  refuse_sharded(optimizer, "load_optimizer_state: of a sharded optimizer, use its own load_state_dict()");
  load_state(0, pieces_of(optimizer, module), optimizer, state, dtypes);
}

}  // namespace shoal
