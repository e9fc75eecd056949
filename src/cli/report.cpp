#include "cli/report.h"

#include <fmt/format.h>
#include <torch/version.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <set>

#include "models/digest.h"
#include "shoal/base/error.h"

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

Json digests(const torch::OrderedDict<std::string, at::Tensor>& named) {
  Json result = Json::object();
  uint64_t index = 0;
  for (const auto& [name, tensor] : once(named)) {
    const auto digest = models::digest(index++, tensor);
    result[name] = {{"shape", tensor.sizes().vec()},
                    {"sum", digest.sum},
                    {"abs_sum", digest.abs_sum},
                    {"l2", digest.l2},
                    {"probe", digest.probe}};
  }
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

double rounded(double value, double unit) {
  return std::round(value / unit) * unit;
}

Json config(const TrainOptions& options, const World& world) {
  Json result = {{"peer", "shoal"},
                 {"strategy", options.strategy},
                 {"transport", world.group().transport()},
                 {"model", options.model},
                 {"size", options.size},
                 {"data", options.data},
                 {"init", options.init},
                 {"world", world.size()},
                 {"threads", options.threads},
                 {"optimizer", options.optimizer},
                 {"batch", options.batch},
                 {"accumulate", options.accumulate},
                 {"dtype", options.dtype},
                 {"seed", options.seed}};
  result["lr"] = options.lr ? Json(*options.lr) : Json(nullptr);
  if (options.steps) result["steps"] = *options.steps;
  if (options.epochs) result["epochs"] = *options.epochs;
  return result;
}

Json timing(const std::vector<double>& step_ms) {
  auto steady = step_ms;
  if (steady.size() > warm_up) steady.erase(steady.begin(), steady.begin() + warm_up);
  std::sort(steady.begin(), steady.end());
  const auto middle = steady.size() / 2;
  const double median = steady.size() % 2 == 1 ? steady[middle] : (steady[middle - 1] + steady[middle]) / 2;
  Json list = Json::array();
  for (const auto value : step_ms) list.push_back(rounded(value, 1e-3));
  double load[1] = {0};
  getloadavg(load, 1);
  return {{"step_ms", list},
          {"warm_up", warm_up},
          {"median_ms", rounded(median, 1e-3)},
          {"min_ms", rounded(steady.front(), 1e-3)},
          {"load_1min", load[0]}};
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

Json make_report(const TrainOptions& options, const World& world, models::Model& model, const TrainResult& result,
                 const MemoryUse& memory) {
  const auto& group = world.group();
  auto loss = reduced(group, result.loss, ReduceOp::sum);
  for (auto& value : loss) value /= group.size();
  const auto seconds = reduced(group, {result.seconds}, ReduceOp::max).front();
  Json report;
  report["config"] = config(options, world);
  report["versions"] = {{"shoal", SHOAL_VERSION}, {"libtorch", TORCH_VERSION}};
  report["loss"] = loss;
  report["params"] = digests(model.named_parameters());
  report["buffers"] = digests(model.named_buffers());
  report["timing"] = timing(reduced(group, result.step_ms, ReduceOp::max));
  report["timing"]["samples_per_second"] = rounded(static_cast<double>(result.samples * group.size()) / seconds, 0.1);
  report["memory"] = memory_of_ranks(group, memory);
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
  if (path == "-") {
    std::cout << json.dump(1) << std::endl;
    return;
  }
  std::ofstream file(path);
  file << json.dump(1) << '\n';
  file.close();
  if (!file) throw UsageError(fmt::format("cannot write {}: does its folder exist and is it writable?", path));
}

std::vector<std::pair<std::string, at::Tensor>> named_state(const torch::nn::Module& module) {
  auto state = once(module.named_parameters());
  for (auto& entry : once(module.named_buffers())) state.push_back(std::move(entry));
  return state;
}

}  // namespace shoal::cli
