#include "elastic/admission.h"

#include <c10/util/Type.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>
#include <torch/version.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>
#include <typeinfo>

#include "base/printable.h"
#include "comm/group/text.h"
#include "engine/wrapper/data_parallel_state.h"
#include "optim/named_options.h"
#include "optim/state.h"
#include "shoal/detail/optimizer_state.h"
#include "shoal/error.h"
#include "shoal/hooks.h"
#include "shoal/precision.h"

namespace shoal {
namespace {

using Json = nlohmann::json;

constexpr const char* cannot_give = "!";  // before the reason, in place of the state
constexpr size_t most_differences = 6;    // that one error names

// Dtypes of 16 bits whose range asks for a loss scale.
bool may_need_scaler(const LoggingData& data) {
  const auto half = [](const std::string& name) { return name.find("Half") != std::string::npos; };
  return std::any_of(data.dtypes.begin(), data.dtypes.end(), half) ||
         std::any_of(data.settings.begin(), data.settings.end(), [](const auto& setting) {
           return setting.first == "precision" && setting.second.find("float16") != std::string::npos &&
                  setting.second.find("bfloat16") == std::string::npos;
         });
}

// Whether reset() drops all that the hook carries from step to step. PowerSgdHook counts steps, and hooks of a program's own
// may do anything.
bool begins_anew(const CommunicationHook& hook) {
  const auto& type = typeid(hook);
  return type == typeid(SumHook) || type == typeid(CompressHook) || type == typeid(QuantizeHook) ||
         type == typeid(TopKHook);
}

std::string yes_or_no_scaler(const GradScaler* scaler) {
  return scaler != nullptr ? "given" : "none";
}

// Without the learning rate, which a newcomer gets.
std::string fixed_options(const torch::optim::OptimizerOptions& options) {
  auto named = named_options(options);
  named.erase("lr");
  return named.dump();
}

std::string shape_of(const at::Tensor& tensor) {
  return fmt::format("{} [{}]", c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), ", "));
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t begin = 0; begin < text.size();) {
    const auto end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

void send_to(const Group& group, int to, const at::Tensor& tensor) {
  if (tensor.numel() == 0) return;
  group.send(tensor.detach().cpu().contiguous().view({-1}), to, 0, {-1, -1, "state for a newcomer"}).wait();
}

void receive(const Group& group, const at::Tensor& tensor) {
  if (tensor.numel() == 0) return;
  auto values = at::empty({tensor.numel()}, at::TensorOptions(tensor.scalar_type()));
  group.recv(values, 0, 0, {-1, -1, "state for a newcomer"}).wait();
  at::Tensor(tensor.detach()).copy_(values.view(tensor.sizes()));
}

}  // namespace

Admission::Admission(ElasticParts& parts, const DistributedSampler* sampler, const ElasticOptions& options,
                     GlobalBatch& batch, const std::string& transport, bool of_registry)
    : parts_(parts),
      sampler_(sampler),
      options_(options),
      batch_(batch),
      transport_(transport),
      of_registry_(of_registry) {}

std::string Admission::why_closed() const {
  if (of_registry_) return "it trains by a training of the registry (make_training), which cannot be joined yet";
  if (parts_.replicated() == nullptr) {
    return "its optimizer is sharded, and only DistributedDataParallel with an optimizer that is whole on each rank "
           "can "
           "be joined yet";
  }
  const auto& optimizer = *parts_.whole_optimizer();
  if (!is_state_known(optimizer)) {
    return fmt::format("the state of its optimizer {} is not registered (shoal::register_state)",
                       c10::demangle(typeid(optimizer).name()));
  }
  const auto* hook = reducer_of(*parts_.replicated()).reduction().hook();
  if (hook != nullptr && !begins_anew(*hook)) {
    return fmt::format("its communication hook, {}, may keep more from step to step than a change of the ranks drops",
                       hook->name());
  }
  if (options_.scaler == nullptr && may_need_scaler(parts_.replicated()->logging_data())) {
    return "it trains in float16 without ElasticOptions::scaler, so the loss scale could not be given";
  }
  return "";
}

// Line by line what must be equal; a line begins with what it is about.
std::vector<std::string> Admission::description() const {
  const auto& parallel = *parts_.replicated();
  const auto data = parallel.logging_data();
  std::vector<std::string> lines{
      fmt::format("libtorch: {}", TORCH_VERSION),
      fmt::format("transport: {}", transport_),
      fmt::format("strategy: {}", data.strategy),
      fmt::format("module: {}", data.module),
      fmt::format("min_ranks: {}", options_.min_ranks),
      fmt::format("keep_global_batch: {}", options_.keep_global_batch > 0 ? "yes" : "no"),
      fmt::format("loss scaler: {}", yes_or_no_scaler(options_.scaler)),
  };
  if (sampler_ == nullptr) {
    lines.emplace_back("sampler: none");
  } else {
    const auto& how = sampler_->options();
    lines.push_back(fmt::format("sampler: {} samples, seed {}, shuffle {}, drop_last {}, pad {}", sampler_->size(),
                                how.seed, how.shuffle, how.drop_last, how.pad));
  }
  for (const auto& [name, value] : data.settings) lines.push_back(fmt::format("{}: {}", name, value));
  const auto& optimizer = *parts_.whole_optimizer();
  lines.push_back(fmt::format("optimizer: {}", c10::demangle(typeid(optimizer).name())));
  const auto& groups = optimizer.param_groups();
  for (size_t i = 0; i < groups.size(); ++i) {
    const auto parameters = groups[i].params().size();
    lines.push_back(
        fmt::format("param group {}: {} parameters, {}", i, parameters, fixed_options(groups[i].options())));
  }
  for (size_t i = 0; i < options_.tensors.size(); ++i) {
    lines.push_back(fmt::format("ElasticOptions::tensors[{}]: {}", i, shape_of(options_.tensors[i])));
  }
  for (const auto& line : parallel.description_of_tensors()) lines.push_back(line);
  for (auto& line : lines) std::replace(line.begin(), line.end(), '\n', ' ');
  return lines;
}

void Admission::publish(JoinBoard& board) const {
  const auto why = why_closed();
  why.empty() ? board.publish(fmt::format("{}\n", fmt::join(description(), "\n"))) : board.close(why);
}

void Admission::require_alike(const std::string& job) const {
  const auto theirs = lines_of(job);
  const auto own = description();
  std::vector<std::string> differences;
  for (size_t i = 0; i < std::max(theirs.size(), own.size()); ++i) {
    const auto here = i < own.size() ? own[i] : "nothing more";
    const auto there = i < theirs.size() ? printable(theirs[i]) : "nothing more";
    if (here != there) differences.push_back(fmt::format("{} (the job: {})", here, there));
  }
  if (differences.empty()) return;
  const auto more = differences.size() > most_differences ? differences.size() - most_differences : 0;
  differences.resize(differences.size() - more);
  throw UsageError(fmt::format("Elastic: this process cannot join the job, because it differs: {}{}",
                               fmt::join(differences, "; "), more > 0 ? fmt::format("; and {} more", more) : ""));
}

void Admission::require_alike(JoinBoard& board, int timeout_seconds, const std::function<void()>& while_waiting) const {
  const auto own = why_closed();
  if (!own.empty()) throw UsageError("Elastic: a process cannot join a job like this one: " + own);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(timeout_seconds);
  while (!board.description()) {
    const auto closed = board.why_closed();
    if (!closed.empty()) throw UsageError("Elastic: ranks cannot join this job: " + closed);
    if (std::chrono::steady_clock::now() > deadline) {
      throw UsageError(
          fmt::format("Elastic: no rank of the job has constructed its Elastic within {} s", timeout_seconds));
    }
    if (while_waiting) while_waiting();
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  require_alike(*board.description());
}

// Everything but the values of tensors.
std::string Admission::state_text(const Position& position, const OptimizerState& whole) const {
  Json json;
  json["description"] = fmt::format("{}\n", fmt::join(description(), "\n"));
  json["done"] = position.done;
  json["steps_before"] = position.steps_before;
  json["taken"] = position.taken;
  json["inside"] = position.epoch.has_value();
  json["epoch"] = position.epoch.value_or(position.next_epoch);
  json["batch"] = {{"size", batch_.size()}, {"shares", batch_.first_shares()}, {"seed", batch_.first_seed()}};
  json["order"] = parts_.replicated()->learnt_order();
  for (const auto& group : parts_.whole_optimizer()->param_groups()) {
    json["options"].push_back(named_options(group.options()));
  }
  if (options_.scaler != nullptr) {
    const auto state = options_.scaler->state();
    json["scaler"] = {state.scale, state.good_steps, state.hysteresis_left};
  }
  auto& states = json["state"] = Json::object();
  for (const auto& [name, state] : whole) {
    auto& one = states[name] = {{"numbers", state.numbers}, {"tensors", Json::object()}};
    for (const auto& [field, tensor] : state.tensors) {
      one["tensors"][field] = {static_cast<int>(tensor.scalar_type()), tensor.sizes().vec()};
    }
  }
  return json.dump();
}

std::vector<at::Tensor> Admission::plain_tensors() const {
  std::vector<at::Tensor> list;
  for (const auto& [name, tensor] : parts_.replicated()->tensors()) list.push_back(tensor);
  list.insert(list.end(), options_.tensors.begin(), options_.tensors.end());
  return list;
}

void Admission::take(const std::string& text, const Group& group, Position& position) const {
  const auto json = Json::parse(text);
  require_alike(json.at("description").get<std::string>());
  for (const auto& tensor : plain_tensors()) receive(group, tensor);
  OptimizerState whole;
  for (const auto& [name, one] : json.at("state").items()) {
    auto& state = whole[name];
    state.numbers = one.at("numbers").get<std::map<std::string, double>>();
    for (const auto& [field, like] : one.at("tensors").items()) {
      const auto dtype = static_cast<at::ScalarType>(like.at(0).get<int>());
      auto values = at::empty(like.at(1).get<std::vector<int64_t>>(), at::TensorOptions(dtype));
      receive(group, values);
      state.tensors[field] = values;
    }
  }
  auto& optimizer = *parts_.whole_optimizer();
  load_optimizer_state(optimizer, parts_.module(), whole);
  auto& groups = optimizer.param_groups();
  for (size_t i = 0; i < groups.size(); ++i) set_options(groups[i].options(), json.at("options").at(i));
  if (options_.scaler != nullptr) {
    const auto& scaler = json.at("scaler");
    options_.scaler->load({scaler.at(0), scaler.at(1), scaler.at(2)});
  }
  const auto& batch = json.at("batch");
  batch_.adopt(batch.at("size"), batch.at("shares"), batch.at("seed"));
  parts_.replicated()->follow_order(json.at("order").get<std::vector<size_t>>());
  position.done = json.at("done");
  position.steps_before = json.at("steps_before");
  position.taken = json.at("taken");
  position.next_epoch = json.at("epoch");
  position.epoch.reset();
  if (json.at("inside").get<bool>()) position.epoch = position.next_epoch;
}

void Admission::share(const Group& group, const std::vector<bool>& newcomers, Position& position) const {
  const torch::NoGradGuard no_grad;
  const auto rank = static_cast<size_t>(group.rank());
  OptimizerState whole;
  std::string own;
  if (rank == 0) {
    try {
      whole = optimizer_state(*parts_.whole_optimizer(), parts_.module());
      own = state_text(position, whole);
    } catch (const std::exception& error) {  // which must not cost the job
      own = cannot_give + std::string(error.what());
    }
  }
  const auto text = broadcast_text(group, own, 0, {-1, -1, "state for a newcomer"});
  if (text.starts_with(cannot_give)) {
    if (newcomers[rank]) throw UsageError("Elastic: the job has no state to give: " + text.substr(1));
    throw CommError("the state cannot be given: " + text.substr(1));
  }
  if (newcomers[rank]) {
    take(text, group, position);
  } else {
    // All ranks go on with the order of one, as after a death.
    parts_.replicated()->follow_order(Json::parse(text).at("order").get<std::vector<size_t>>());
  }
  if (rank == 0) {
    for (size_t to = 1; to < newcomers.size(); ++to) {
      if (!newcomers[to]) continue;
      for (const auto& tensor : plain_tensors()) send_to(group, static_cast<int>(to), tensor);
      for (const auto& [name, state] : whole) {
        for (const auto& [field, tensor] : state.tensors) send_to(group, static_cast<int>(to), tensor);
      }
    }
  }
  // Whoever fails with the state has told the others by now.
  group.all_reduce(std::vector<double>{1.0}, ReduceOp::sum, {-1, -1, "all ranks have the state"});
}

}  // namespace shoal
