#include "engine/wrapper/logging.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/environment.h"

namespace shoal {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr const char* watched_variables[] = {"RANK",
                                             "WORLD_SIZE",
                                             "LOCAL_RANK",
                                             "MASTER_ADDR",
                                             "MASTER_PORT",
                                             "OMP_NUM_THREADS",
                                             "MKL_NUM_THREADS",
                                             "SHOAL_FLIGHT_RECORDER",
                                             "GLOO_SOCKET_IFNAME",
                                             "GLOO_DEVICE_TRANSPORT",
                                             "NCCL_SOCKET_IFNAME",
                                             "NCCL_IB_DISABLE",
                                             "NCCL_P2P_DISABLE",
                                             "NCCL_DEBUG",
                                             "CUDA_VISIBLE_DEVICES",
                                             "TORCH_DISTRIBUTED_DEBUG"};

LoggingData::Settings environment_that_matters() {
  LoggingData::Settings found;
  const auto environment = process_environment();
  for (const auto* name : watched_variables) {
    if (const auto value = environment(name)) found.emplace_back(name, *value);
  }
  return found;
}

OrderedJson object_of(const LoggingData::Settings& settings) {
  OrderedJson object = OrderedJson::object();
  for (const auto& [name, value] : settings) object[name] = value;
  return object;
}

OrderedJson object_of(const StepTimes& times) {
  return {{"forward_ms", times.forward},
          {"backward_ms", times.backward},
          {"communication_ms", times.communication},
          {"overlap_ms", times.overlap}};
}

OrderedJson object_of(const LoggingData& data) {
  return {{"strategy", data.strategy},
          {"module", data.module},
          {"group", data.group},
          {"transport", data.transport},
          {"rank", data.rank},
          {"world_size", data.world_size},
          {"device", data.device},
          {"dtypes", data.dtypes},
          {"trainable_tensors", data.trainable_tensors},
          {"trainable_bytes", data.trainable_bytes},
          {"frozen_tensors", data.frozen_tensors},
          {"frozen_bytes", data.frozen_bytes},
          {"buffer_tensors", data.buffer_tensors},
          {"buffer_bytes", data.buffer_bytes},
          {"communication_hook", data.communication_hook},
          {"settings", object_of(data.settings)},
          {"environment", object_of(data.environment)},
          {"first_bucket_bytes", data.first_bucket_bytes},
          {"bucket_bytes", data.bucket_bytes},
          {"rebuilt", data.rebuilt},
          {"steps", data.steps},
          {"unused_parameters", data.unused_parameters},
          {"unused_bytes", data.unused_bytes},
          {"sampled_steps", data.sampled_steps},
          {"last", object_of(data.last)},
          {"mean", object_of(data.mean)}};
}

std::string in_words(const OrderedJson& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number_float()) return fmt::format("{:.3f}", value.get<double>());
  if (!value.is_array()) return value.dump();
  std::vector<std::string> parts;
  for (const auto& each : value) parts.push_back(in_words(each));
  return fmt::format("{}", fmt::join(parts, ", "));
}

void add_lines(const std::string& prefix, const OrderedJson& object, std::string& table) {
  for (const auto& [name, value] : object.items()) {
    if (value.is_object()) {
      add_lines(prefix + name + ".", value, table);
    } else {
      table += fmt::format("{:<36} {}\n", prefix + name, in_words(value));
    }
  }
}

}  // namespace

std::string to_json(const LoggingData& data) {
  return object_of(data).dump();
}

std::string to_table(const LoggingData& data) {
  std::string table;
  add_lines("", object_of(data), table);
  return table;
}

std::string in_words(const GradScaler* scaler) {
  if (scaler == nullptr) return "none";
  const auto& options = scaler->options();
  if (!options.dynamic) return "constant";
  return fmt::format("grows by {} after {} steps, shrinks by {} after {} of inf or NaN, to {} at least",
                     options.growth_factor, options.growth_interval, options.backoff_factor, options.hysteresis,
                     options.min_scale);
}

std::string in_words(const CommunicationHook* hook) {
  return hook == nullptr ? "none" : hook->name();
}

std::string in_words(const BufferHook* hook, BufferHookLocation location) {
  if (hook == nullptr) return "none";
  return location == BufferHookLocation::pre_forward ? "before forward" : "after forward";
}

void agree_on_settings(const Group& group, const std::string& wrapper, const LoggingData::Settings& settings) {
  std::vector<std::string> lines;
  for (const auto& [name, value] : settings) lines.push_back(name + " " + value);
  agree(group, "the options of " + wrapper, lines);
}

std::string in_words(const Precision& precision) {
  return fmt::format("parameters {}, computes in {}, scaler {}", c10::toString(precision.parameters),
                     c10::toString(precision.compute.value_or(precision.parameters)),
                     yes_or_no(precision.scaler.has_value()));
}

std::string yes_or_no(bool value) {
  return value ? "yes" : "no";
}

LoggingData log_of(const std::string& strategy, const torch::nn::Module& module, const Group& group,
                   LoggingData::Settings settings) {
  LoggingData data;
  data.strategy = strategy;
  data.module = module.name();
  data.group = group.name();
  data.transport = group.transport();
  data.rank = group.rank();
  data.world_size = group.size();
  data.settings = std::move(settings);
  data.environment = environment_that_matters();
  return data;
}

void add_model(LoggingData& data, const ModuleTensors& tensors) {
  for (const auto& entry : tensors.parameters) {
    const bool trained = entry.tensor.requires_grad();
    ++(trained ? data.trainable_tensors : data.frozen_tensors);
    (trained ? data.trainable_bytes : data.frozen_bytes) += static_cast<int64_t>(entry.tensor.nbytes());
    if (data.device.empty()) data.device = entry.tensor.device().str();
    const std::string dtype = c10::toString(entry.tensor.scalar_type());
    if (std::find(data.dtypes.begin(), data.dtypes.end(), dtype) == data.dtypes.end()) data.dtypes.push_back(dtype);
  }
  for (const auto& entry : tensors.buffers) {
    ++data.buffer_tensors;
    data.buffer_bytes += static_cast<int64_t>(entry.tensor.nbytes());
  }
}

void add_steps(LoggingData& data, const Reducer& reducer) {
  const auto append = [](std::vector<int64_t>& to, const std::vector<int64_t>& from) {
    to.insert(to.end(), from.begin(), from.end());
  };
  append(data.first_bucket_bytes, reducer.buckets().first_bytes());
  append(data.bucket_bytes, reducer.buckets().bytes());
  data.rebuilt = data.rebuilt || reducer.order().followed();
  data.steps = std::max(data.steps, reducer.step());
  if (const auto* hook = reducer.reduction().hook()) data.communication_hook = hook->name();
  for (const auto number : reducer.unused()) {
    const auto& gradient = reducer.gradients()[number];
    data.unused_parameters.push_back(gradient.name);
    data.unused_bytes += static_cast<int64_t>(gradient.parameter.nbytes());
  }
  reducer.clock().write_to(data);
}

}  // namespace shoal
