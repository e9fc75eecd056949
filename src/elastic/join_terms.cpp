#include "elastic/join_terms.h"

#include <c10/util/Type.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/version.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>
#include <typeinfo>

#include "base/printable.h"
#include "elastic/access.h"
#include "engine/wrapper/logging.h"
#include "optim/named_options.h"
#include "optim/state.h"
#include "shoal/error.h"
#include "shoal/hooks.h"

namespace shoal {
namespace {

constexpr size_t most_differences = 6;  // that one error names

// Dtypes of 16 bits whose range asks for a loss scale.
bool may_need_scaler(const LoggingData& data) {
  const auto half = [](const std::string& name) { return name.find("Half") != std::string::npos; };
  return std::any_of(data.dtypes.begin(), data.dtypes.end(), half) ||
         std::any_of(data.settings.begin(), data.settings.end(), [](const auto& setting) {
           return setting.first == "precision" && setting.second.find("Half") != std::string::npos;
         });
}

// Whether reset() drops all that the hook carries from step to step. PowerSgdHook counts steps, and hooks of a
// program's own may do anything.
bool begins_anew(const CommunicationHook& hook) {
  const auto& type = typeid(hook);
  return type == typeid(SumHook) || type == typeid(CompressHook) || type == typeid(QuantizeHook) ||
         type == typeid(TopKHook);
}

// A lone newcomer has other values of these than ranks beside others.
bool follows_ranks(const std::string& setting) {
  return setting == "shard_size" || setting == "parameters_once_per_host";
}

// Numbers without their values, which schedules change and a newcomer gets.
std::string in_words(const torch::optim::OptimizerOptions& options) {
  const auto is_number = [](const nlohmann::json& value) { return number_from(value).has_value(); };
  std::vector<std::string> list;
  const auto named = named_options(options);
  for (const auto& [name, value] : named.items()) {
    const bool numbers = value.is_array() ? std::all_of(value.begin(), value.end(), is_number) : is_number(value);
    list.push_back(numbers ? name : fmt::format("{} {}", name, value.dump()));
  }
  return fmt::format("{} {}", type_of(options), fmt::join(list, ", "));
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

}  // namespace

JoinTerms::JoinTerms(const ElasticParts& parts, const DistributedSampler* sampler, const ElasticOptions& options,
                     ElasticTraining* training, const std::string& transport)
    : parts_(parts), sampler_(sampler), options_(options), training_(training), transport_(transport) {}

GradScaler* JoinTerms::scaler() const {
  if (options_.scaler != nullptr || training_ == nullptr) return options_.scaler;
  return ElasticAccess::loss_scaler(*training_);
}

std::string JoinTerms::why_closed() const {
  if (auto why = parts_.why_closed(); !why.empty()) return why;
  if (parts_.sharded() && !parts_.shards_over_sockets() && (transport_ == "tcp" || transport_ == "gloo")) {
    return fmt::format("its optimizer is sharded, which needs the transport host, and its transport is {}", transport_);
  }
  if (transport_ == "tcp" || transport_ == "gloo") {
    if (auto why = parts_.why_one_host(); !why.empty()) return why;
  }
  const auto* sharded = dynamic_cast<const ShardedOptimizerBase*>(&parts_.optimizer());
  const auto& optimizer = sharded != nullptr ? sharded->local_optimizer() : parts_.optimizer();
  if (!is_state_known(optimizer)) {
    return fmt::format("the state of its optimizer {} is not registered (shoal::register_state)",
                       c10::demangle(typeid(optimizer).name()));
  }
  const auto* reducer = parts_.reducer();
  const auto* hook = reducer != nullptr ? reducer->reduction().hook() : nullptr;
  if (hook != nullptr && !begins_anew(*hook)) {
    return fmt::format("its communication hook, {}, may keep more from step to step than a change of the ranks drops",
                       hook->name());
  }
  if (scaler() == nullptr && parts_.own_scaler() == nullptr && !options_.state_has_scaler &&
      may_need_scaler(parts_.logging_data())) {
    return "it trains in float16 without ElasticOptions::scaler or state_has_scaler, so the loss scale could not be "
           "given";
  }
  return "";
}

std::vector<std::string> JoinTerms::lines() const {
  const auto data = parts_.logging_data();
  std::vector<std::string> lines{
      fmt::format("libtorch: {}", TORCH_VERSION),
      fmt::format("transport: {}", transport_),
      fmt::format("strategy: {}", data.strategy),
      fmt::format("module: {}", data.module),
      fmt::format("min_ranks: {}", options_.min_ranks),
      fmt::format("straggler_seconds: {}", options_.straggler_seconds),
      fmt::format("keep_global_batch: {}", options_.keep_global_batch > 0 ? "yes" : "no"),
      fmt::format("loss scaler: {}", in_words(scaler())),
      fmt::format("state of the program: {}", options_.save_state ? "yes" : "no"),
      fmt::format("communication hook: {}", data.communication_hook),
  };
  if (sampler_ == nullptr) {
    lines.emplace_back("sampler: none");
  } else {
    const auto& how = sampler_->options();
    lines.push_back(fmt::format("sampler: {} samples, seed {}, shuffle {}, drop_last {}, pad {}", sampler_->size(),
                                how.seed, how.shuffle, how.drop_last, how.pad));
  }
  for (const auto& [name, value] : data.settings) {
    if (!follows_ranks(name)) lines.push_back(fmt::format("{}: {}", name, value));
  }
  const auto& optimizer = parts_.optimizer();
  lines.push_back(fmt::format("optimizer: {}", c10::demangle(typeid(optimizer).name())));
  if (const auto* sharded = dynamic_cast<const ShardedOptimizerBase*>(&optimizer)) {
    const auto& local = sharded->local_optimizer();
    lines.push_back(fmt::format("optimizer of a share: {}", c10::demangle(typeid(local).name())));
  }
  const auto append = [&](const std::vector<std::string>& more) {
    lines.insert(lines.end(), more.begin(), more.end());
  };
  append(parts_.description());
  if (training_ != nullptr) append(ElasticAccess::description(*training_));
  const auto& groups = optimizer.param_groups();
  std::map<const c10::TensorImpl*, std::string> names;
  for (const auto& entry : parts_.tensors().parameters) names[entry.tensor.unsafeGetTensorImpl()] = entry.name;
  const auto name_of = [&](const at::Tensor& parameter) {
    const auto name = names.find(parameter.unsafeGetTensorImpl());
    return name != names.end() ? name->second : shape_of(parameter);  // beside the module
  };
  for (size_t i = 0; i < groups.size(); ++i) {
    const auto& parameters = groups[i].params();
    lines.push_back(
        fmt::format("param group {}: {} parameters, {}", i, parameters.size(), in_words(groups[i].options())));
    std::vector<std::string> list;
    for (const auto& parameter : parameters) list.push_back(name_of(parameter));
    lines.push_back(fmt::format("parameters of group {}: {}", i, fmt::join(list, ", ")));
  }
  for (size_t i = 0; i < options_.tensors.size(); ++i) {
    lines.push_back(fmt::format("ElasticOptions::tensors[{}]: {}", i, shape_of(options_.tensors[i])));
  }
  append(parts_.tensors().describe());
  for (auto& line : lines) std::replace(line.begin(), line.end(), '\n', ' ');
  return lines;
}

std::string JoinTerms::text() const {
  return fmt::format("{}\n", fmt::join(lines(), "\n"));
}

void JoinTerms::publish(JoinTable& table) const {
  const auto why = why_closed();
  why.empty() ? table.publish(text()) : table.close(why);
}

// other: a text(). whose: in words. Empty: there are none.
std::string JoinTerms::differences_from(const std::string& other, const char* whose) const {
  const auto theirs = lines_of(other);
  const auto own = lines();
  std::vector<std::string> differences;
  for (size_t i = 0; i < std::max(theirs.size(), own.size()); ++i) {
    const auto here = i < own.size() ? own[i] : "nothing more";
    const auto there = i < theirs.size() ? printable(theirs[i]) : "nothing more";
    if (here != there) differences.push_back(fmt::format("{} ({}: {})", here, whose, there));
  }
  const auto more = differences.size() > most_differences ? differences.size() - most_differences : 0;
  differences.resize(differences.size() - more);
  return fmt::format("{}{}", fmt::join(differences, "; "), more > 0 ? fmt::format("; and {} more", more) : "");
}

void JoinTerms::require_alike(const std::string& job) const {
  const auto differences = differences_from(job, "the job");
  if (differences.empty()) return;
  throw UsageError("Elastic: this process cannot join the job, because it differs: " + differences);
}

std::string JoinTerms::changed_since(const JoinTable& table) const {
  const auto said = table.description();
  return said ? differences_from(*said, "when its ranks constructed Elastic") : "";
}

void JoinTerms::require_alike(JoinTable& table, int timeout_seconds, const std::function<void()>& while_waiting) const {
  const auto own = why_closed();
  if (!own.empty()) throw UsageError("Elastic: a process cannot join a job like this one: " + own);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(timeout_seconds);
  while (true) {
    table.refresh();
    if (table.description()) break;
    const auto closed = table.why_closed();
    if (!closed.empty()) throw UsageError("Elastic: ranks cannot join this job: " + closed);
    if (std::chrono::steady_clock::now() > deadline) {
      throw UsageError(
          fmt::format("Elastic: no rank of the job has constructed its Elastic within {} s", timeout_seconds));
    }
    if (while_waiting) while_waiting();
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  require_alike(*table.description());
}

}  // namespace shoal
