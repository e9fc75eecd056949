#include "cli/train/report.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <torch/version.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <numeric>
#include <set>
#include <utility>

#include "cli/strategies/optimizers.h"
#include "models/digest.h"
#include "planning/measured_step.h"
#include "planning/samples.h"
#include "shoal/error.h"

namespace shoal::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t warm_up = 3;  // steps left out of the median

std::vector<std::pair<std::string, at::Tensor>> once(const torch::OrderedDict<std::string, at::Tensor>& named) {
  std::set<const c10::TensorImpl*> seen;
  std::vector<std::pair<std::string, at::Tensor>> list;
  for (const auto& item : named) {
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) list.emplace_back(item.key(), item.value());
  }
  return list;
}

Json json_of(const at::Tensor& tensor, const models::Digest& digest) {
  return {{"shape", tensor.sizes().vec()},
          {"sum", digest.sum},
          {"abs_sum", digest.abs_sum},
          {"l2", digest.l2},
          {"probe", digest.probe}};
}

Json digests(const torch::OrderedDict<std::string, at::Tensor>& named) {
  Json result = Json::object();
  uint64_t index = 0;
  for (const auto& [name, tensor] : once(named)) result[name] = json_of(tensor, models::digest(index++, tensor));
  return result;
}

std::vector<double> reduced(const Group& group, const std::vector<double>& values, ReduceOp op) {
  auto tensor = at::tensor(values, at::kDouble);
  group.all_reduce(tensor, op, {-1, -1, "report"}).wait();
  return {tensor.data_ptr<double>(), tensor.data_ptr<double>() + tensor.numel()};
}

std::vector<double> gathered(const Group& group, double value) {
  auto all = at::empty({group.size()}, at::kDouble);
  group.all_gather(all, at::full({1}, value, at::kDouble), {-1, -1, "report"}).wait();
  return {all.data_ptr<double>(), all.data_ptr<double>() + all.numel()};
}

// Values of the steps of all ranks, some of which came later: those that have none of a step have 0.
class Steps {
 public:
  // missed: steps before this rank came. Collective.
  Steps(const Group& group, int64_t missed, size_t own) : group_(group), missed_(static_cast<size_t>(missed)) {
    std::vector<double> made(missed_, 0);
    made.resize(missed_ + own, 1);
    ranks_ = reduced(group_, made, ReduceOp::sum);
    while (first_ < ranks_.size() && ranks_[first_] == 0) ++first_;
  }
  // Steps that no rank has made which is left.
  size_t first() const { return first_; }
  std::vector<double> mean(const std::vector<double>& own) const {
    auto values = all(own, ReduceOp::sum);
    for (size_t i = 0; i < values.size(); ++i) values[i] /= ranks_[first_ + i];
    return values;
  }
  std::vector<double> most(const std::vector<double>& own) const { return all(own, ReduceOp::max); }

 private:
  std::vector<double> all(const std::vector<double>& own, ReduceOp op) const {
    std::vector<double> values(missed_, 0);
    values.insert(values.end(), own.begin(), own.end());
    values = reduced(group_, values, op);
    return {values.begin() + static_cast<int64_t>(first_), values.end()};
  }

  const Group& group_;
  size_t missed_;
  size_t first_ = 0;
  std::vector<double> ranks_;  // that have made the step
};

double rounded(double value, double unit) {
  return std::round(value / unit) * unit;
}

Json config(const TrainOptions& options, const World& world) {
  Json result = {{"peer", "shoal"},
                 {"strategy", options.strategy},
                 {"transport", world.group().transport()},
                 {"device", options.device},
                 {"model", options.model},
                 {"size", options.size},
                 {"data", options.data},
                 {"init", options.init},
                 {"world", world.size()},
                 {"threads", at::get_num_threads()},
                 {"optimizer", options.optimizer},
                 {"batch", options.batch},
                 {"accumulate", options.accumulate},
                 {"dtype", options.dtype},
                 {"compress", options.compress()},
                 {"seed", options.seed}};
  result["lr"] = recipe_of(options).defaults->get_lr();
  if (options.accum_iter) result["accum_iter"] = *options.accum_iter;
  result["schedule"] = options.schedule;
  if (options.warmup_steps) result["warmup_steps"] = *options.warmup_steps;
  if (options.decay_every) result["decay_every"] = *options.decay_every;
  if (options.decay_factor) result["decay_factor"] = *options.decay_factor;
  if (options.chosen().has("sync_every")) result["sync_every"] = options.values().integer("sync_every");
  if (!options.replan.empty()) result["replan"] = options.replan;
  if (options.steps) result["steps"] = *options.steps;
  if (options.epochs) result["epochs"] = *options.epochs;
  return result;
}

// Values after the warm-up; 0 on a rank that came when all was done.
Samples steady_part(std::vector<double> values) {
  if (values.empty()) values.push_back(0);
  if (values.size() > warm_up) values.erase(values.begin(), values.begin() + warm_up);
  return {std::move(values)};
}

Json timing(const std::vector<double>& step_ms) {
  const auto steady = steady_part(step_ms);
  Json list = Json::array();
  for (const auto value : step_ms) list.push_back(rounded(value, 1e-3));
  double load[1] = {0};
  getloadavg(load, 1);
  return {{"step_ms", list},
          {"warm_up", warm_up},
          {"median_ms", rounded(steady.median(), 1e-3)},
          {"min_ms", rounded(steady.min(), 1e-3)},
          {"load_1min", load[0]}};
}

// Means over the steps after the warm-up.
Json counters_of_ranks(const Group& group, const std::vector<Counters>& steps) {
  const auto mean = [&](const auto& field) {
    std::vector<double> values;
    for (const auto& step : steps) values.push_back(static_cast<double>(field(step)));
    const auto steady = steady_part(std::move(values)).values;
    return std::accumulate(steady.begin(), steady.end(), 0.0) / static_cast<double>(steady.size());
  };
  Json result;
  const auto put = [&](const char* name, double value) {
    for (const auto each : gathered(group, value)) result[name].push_back(rounded(each, 1e-3));
  };
  put("page_faults", mean([](const Counters& step) { return step.page_faults; }));
  put("user_ms", mean([](const Counters& step) { return step.user_ms; }));
  put("system_ms", mean([](const Counters& step) { return step.system_ms; }));
  put("sleeps", mean([](const Counters& step) { return step.sleeps; }));
  put("preemptions", mean([](const Counters& step) { return step.preemptions; }));
  return result;
}

// Memory of the ranks by kind.
Json parts_of_ranks(const Group& group, const TrainResult& result, const models::Model& model) {
  Json parts;
  for (const auto& [name, value] :
       {std::pair("params_mib", result.params_mib), std::pair("grads_mib", result.grads_mib),
        std::pair("state_mib", result.state_mib), std::pair("buffers_mib", mebibytes(model.buffers()))}) {
    for (const auto each : gathered(group, value)) parts[name].push_back(rounded(each, 1e-6));
  }
  return parts;
}

Json memory_of_ranks(const Group& group, const MemoryUse& memory) {
  Json result;
  const auto put = [&](const char* name, double value) {
    Json list = Json::array();
    for (const auto each : gathered(group, value)) list.push_back(rounded(each, 0.1));
    result[name] = list;
  };
  put("rss_before_mib", memory.before);
  put("rss_peak_mib", memory.peak);
  put("growth_mib", memory.peak - memory.before);
  put("pss_mib", memory.pss);
  return result;
}

}  // namespace

Json digests_of_ranks(const Group& group, const models::Model& model) {
  const auto named = once(model.named_parameters());
  std::vector<models::Digest> own;
  for (const auto& [name, tensor] : named) own.push_back(models::digest(own.size(), tensor));
  const auto numbers = static_cast<int64_t>(own.size() * sizeof(models::Digest) / sizeof(double));
  auto all = at::empty({group.size() * numbers}, at::kDouble);
  group.all_gather(all, at::from_blob(own.data(), {numbers}, at::kDouble), {-1, -1, "report"}).wait();
  const auto* digest = reinterpret_cast<const models::Digest*>(all.data_ptr<double>());
  Json ranks = Json::array();
  for (int rank = 0; rank < group.size(); ++rank) {
    auto& entry = ranks.emplace_back();
    for (const auto& [name, tensor] : named) entry[name] = json_of(tensor, *digest++);
  }
  return ranks;
}

Json make_report(const TrainOptions& options, const World& world, const Group& group, models::Model& model,
                 const TrainResult& result, const MemoryUse& memory, const Json& params_per_rank) {
  const Steps steps_of_ranks(group, result.missed, result.loss.size());
  const auto seconds = reduced(group, {result.seconds}, ReduceOp::max).front();
  const auto sums =
      reduced(group, {static_cast<double>(result.wire_bytes), static_cast<double>(result.samples)}, ReduceOp::sum);
  Json report;
  report["config"] = config(options, world);
  report["versions"] = {{"shoal", SHOAL_VERSION}, {"libtorch", TORCH_VERSION}};
  report["loss"] = steps_of_ranks.mean(result.loss);
  report["lr"] = steps_of_ranks.most(result.lr);
  report["params"] = digests(model.named_parameters());
  report["buffers"] = digests(model.named_buffers());
  if (!params_per_rank.is_null()) {
    report["params_mean"] = std::exchange(report["params"], params_per_rank.front());
    report["params_per_rank"] = params_per_rank;
  }
  report["timing"] = timing(steps_of_ranks.most(result.step_ms));
  report["timing"]["samples_per_second"] =
      rounded((options.elastic ? static_cast<double>(result.all_samples) : sums[1]) / seconds, 1e-3);
  const auto wait = steady_part(result.wait_ms).median();
  const auto update = steady_part(result.update_ms).median();
  report["timing"]["exposed_comm_ms"] = rounded(wait, 1e-3);
  report["timing"]["update_ms"] = rounded(update, 1e-3);
  report["timing"]["compute_ms"] = rounded(steady_part(result.step_ms).median() - wait - update, 1e-3);
  const auto steps = static_cast<double>(std::max<size_t>(1, result.step_ms.size()));
  report["communication"] = {{"collectives_per_step", static_cast<double>(result.calls) / steps},
                             {"bytes_per_step", std::accumulate(result.sent.begin(), result.sent.end(), 0.0) / steps},
                             {"wire_bytes_per_step", sums[0] / steps},
                             {"step_bytes", result.sent}};
  report["counters_per_step"] = counters_of_ranks(group, result.counted);
  for (const auto& [name, value] : result.figures) report["strategy"][name] = gathered(group, value);
  if (options.elastic) {
    report["elastic"] = {{"min_ranks", *options.elastic},
                         {"ranks", group.size()},
                         {"steps_before", steps_of_ranks.first()},  // the first one in the lists
                         {"changes", result.changes}};
  }
  if (!result.replans.empty()) report["replans"] = result.replans;
  if (result.logging) report["logging"] = Json::parse(to_json(*result.logging));
  report["memory"] = memory_of_ranks(group, memory);
  report["memory"]["params_mib"] = rounded(result.params_mib, 1e-3);
  report["memory"]["grads_mib"] = rounded(result.grads_mib, 1e-3);
  report["memory"]["state_mib"] = rounded(result.state_mib, 1e-3);
  report["memory"]["by_rank"] = parts_of_ranks(group, result, model);
  for (const auto& evaluation : result.eval) {
    Json entry = {{"loss", evaluation.loss}, {"count", evaluation.count}};
    if (options.model == "gpt") {
      entry["perplexity"] = std::exp(evaluation.loss);
    } else {
      entry["accuracy"] = evaluation.accuracy;
    }
    report["eval"].push_back(entry);
  }
  return report;
}

void write_json(const std::string& path, const Json& json) {
  // Names of files need not be UTF-8.
  const auto text = json.dump(1, ' ', false, Json::error_handler_t::replace);
  if (path == "-") {
    std::cout << text << std::endl;
    return;
  }
  write_text(path, text + '\n');
}

void remove_report(const std::string& path) {
  std::error_code ignored;
  if (path == "-") return;
  if (std::filesystem::is_regular_file(std::filesystem::symlink_status(path, ignored))) {
    std::filesystem::remove(path, ignored);
  }
}

void write_text(const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text;
  file.close();
  if (!file) throw UsageError(fmt::format("cannot write {}: {}", path, std::strerror(errno)));
}

std::vector<std::pair<std::string, at::Tensor>> named_state(const torch::nn::Module& module) {
  auto state = once(module.named_parameters());
  for (auto& entry : once(module.named_buffers())) state.push_back(std::move(entry));
  return state;
}

}  // namespace shoal::cli
