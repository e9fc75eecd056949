#include "cli/bench/training.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <optional>

#include "cli/bench/child_end.h"
#include "cli/train/train_options.h"
#include "launch/child.h"
#include "planning/samples.h"
#include "shoal/error.h"
#include "shoal/progress.h"
#include "shoal/training.h"

namespace shoal::cli {
namespace {

using Json = nlohmann::ordered_json;

struct Contestant {
  std::string peer;  // "shoal" or a peer of peers.py
  std::string strategy;
  std::string transport;
  std::vector<std::string> command;
  Variables variables;
};

// Temporary folder for the reports, removed by the destructor.
class Scratch {
 public:
  Scratch() : path_((std::filesystem::temp_directory_path() / "shoal-bench-XXXXXX").string()) {
    if (mkdtemp(path_.data()) == nullptr) throw UsageError("cannot make a folder like " + path_);
  }
  ~Scratch() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// "NAME" or "NAME:TOPOLOGY".
std::string name_of(const std::string& contestant) {
  return contestant.substr(0, contestant.find(':'));
}
void add_topology(const std::string& contestant, std::vector<std::string>& command) {
  const auto colon = contestant.find(':');
  if (colon != std::string::npos) command.insert(command.end(), {"--topology", contestant.substr(colon + 1)});
}

// Options of `shoal train` for a run.
TrainOptions train_options(const TrainingBenchOptions& bench) {
  TrainOptions options;
  options.model = bench.model;
  options.size = bench.size;
  options.data = "reference";
  options.strategy = "local";
  options.ranks = bench.ranks;
  options.threads = bench.threads;
  options.transport = bench.transports.front();
  options.optimizer = bench.optimizer;
  options.batch = bench.batch;
  options.accumulate = bench.accumulate;
  options.steps = bench.steps;
  return options;
}

// UsageError for a contestant that `shoal train` would refuse.
void check_contestant(const std::string& contestant, const TrainingBenchOptions& bench) {
  auto options = train_options(bench).under(name_of(contestant));
  const auto colon = contestant.find(':');
  if (colon != std::string::npos) options.strategy_options["topology"] = contestant.substr(colon + 1);
  try {
    options.complete();
    options.check_strategy(bench.ranks, /*hosts=*/1);
  } catch (const UsageError& error) {
    throw UsageError(fmt::format("--strategies {}: {}", contestant, error.what()));
  }
}

std::vector<Contestant> contestants(const TrainingBenchOptions& options, const std::string& self) {
  const std::vector<std::string> common{"--model",      options.model,
                                        "--size",       options.size,
                                        "--steps",      std::to_string(options.steps),
                                        "--batch",      std::to_string(options.batch),
                                        "--accumulate", std::to_string(options.accumulate),
                                        "--threads",    std::to_string(options.threads),
                                        "--optimizer",  options.optimizer};
  std::vector<Contestant> list;
  for (const auto& strategy : options.strategies) {
    for (const auto& transport : options.transports) {
      const bool alone = find_strategy(name_of(strategy)).synchronization == Synchronization::independent;
      if (alone && transport != options.transports.front()) continue;
      Contestant one{"shoal", strategy, alone ? "none" : transport, {}, {}};
      one.command = {self,          "train",
                     "--data",      "reference",
                     "--strategy",  name_of(strategy),
                     "--transport", transport,
                     "--ranks",     std::to_string(options.ranks)};
      add_topology(strategy, one.command);
      one.command.insert(one.command.end(), common.begin(), common.end());
      // The same as the peers' option sets.
      if (options.exact_memory) one.variables = {{"MALLOC_MMAP_THRESHOLD_", "65536"}};
      list.push_back(std::move(one));
    }
  }
  for (const auto& peer : options.peers) {
    if (options.peer_python.empty()) break;
    Contestant one{peer, peer, peer == "local" ? "none" : "gloo", {}, {}};
    one.command = {options.peer_python, options.peer_script,           "--peer", name_of(peer),
                   "--world",           std::to_string(options.ranks), "--impl", options.peer_impl};
    add_topology(peer, one.command);
    one.command.insert(one.command.end(), common.begin(), common.end());
    if (options.exact_memory) one.command.emplace_back("--exact-memory");
    list.push_back(std::move(one));
  }
  return list;
}

// Report of one run; nothing: the bench was interrupted.
std::optional<Json> run(const Contestant& contestant, const Scratch& scratch, Signals& signals) {
  const auto report = scratch.file("report.json");
  const auto log = scratch.file("log");
  std::error_code absent;
  std::filesystem::remove(report, absent);
  std::vector<std::string> command{"sh", "-c", "log=$1; shift; exec \"$@\" > \"$log\" 2>&1", "sh", log};
  command.insert(command.end(), contestant.command.begin(), contestant.command.end());
  command.insert(command.end(), {"--json", report});
  const auto child = start_child(0, {.command = command}, contestant.variables, Outlets());
  const auto status = wait_for_end(child.pid, signals);
  if (!status) return std::nullopt;
  std::ifstream file(report);
  if (*status != 0 || !file) {
    std::ifstream said(log);
    std::string reason, line;  // programs in Python say it last
    while (std::getline(said, line)) {
      if (!line.empty()) reason = line;
    }
    throw Error(fmt::format("{} {} failed: {}", contestant.peer, contestant.strategy, reason));
  }
  return Json::parse(file);
}

// Of the rank with most, where ranks have values of their own; none: the report does not have it.
std::optional<double> value_of(const Json& report, const char* group, const char* name) {
  if (!report.contains(group) || !report[group].contains(name)) return std::nullopt;
  const auto& value = report[group][name];
  if (value.is_null()) return std::nullopt;
  return value.is_array() ? std::max_element(value.begin(), value.end())->get<double>() : value.get<double>();
}

BenchRound round_of(const Json& report) {
  auto steps = report["timing"]["step_ms"].get<std::vector<double>>();
  const auto warm_up = report["timing"].value("warm_up", 3);
  steps.erase(steps.begin(), steps.begin() + std::min<size_t>(warm_up, steps.size() - 1));
  return {.step_ms = std::move(steps),
          .compute_ms = value_of(report, "timing", "compute_ms"),
          .exposed_comm_ms = value_of(report, "timing", "exposed_comm_ms"),
          .update_ms = value_of(report, "timing", "update_ms"),
          .wire_bytes_per_step = value_of(report, "communication", "wire_bytes_per_step"),
          .collectives_per_step = value_of(report, "communication", "collectives_per_step"),
          .params_mib = value_of(report, "memory", "params_mib"),
          .grads_mib = value_of(report, "memory", "grads_mib"),
          .state_mib = value_of(report, "memory", "state_mib"),
          .growth_mib = value_of(report, "memory", "growth_mib")};
}

Json json_of(const std::optional<double>& value) {
  return value ? Json(*value) : Json();
}

// Of a value that only the reports have.
Json median_of(const std::vector<Json>& reports, const char* group, const char* name) {
  Samples samples;
  for (const auto& report : reports) {
    const auto value = value_of(report, group, name);
    if (!value) return nullptr;
    samples.values.push_back(*value);
  }
  return samples.median();
}

Json figure(const TrainingBench& bench, size_t number, const TrainingBenchOptions& options) {
  const auto& own = bench.figures.strategies[number];
  const auto& reports = bench.reports[number];
  const auto steps = own.step_ms();
  Json entry{{"strategy", own.strategy}, {"peer", bench.peers[number]},   {"transport", own.transport},
             {"model", options.model},   {"size", options.size},          {"ranks", options.ranks},
             {"dtype", "float32"},       {"optimizer", options.optimizer}};
  entry["step_ms"] = {{"min", steps.min}, {"median", steps.median}, {"max", steps.max}};
  for (const auto& round : own.rounds) entry["median_ms_per_round"].push_back(round.median_ms());
  for (const auto& [name, part] :
       {std::pair("compute_ms", &BenchRound::compute_ms), std::pair("exposed_comm_ms", &BenchRound::exposed_comm_ms),
        std::pair("update_ms", &BenchRound::update_ms),
        std::pair("wire_bytes_per_step", &BenchRound::wire_bytes_per_step),
        std::pair("collectives_per_step", &BenchRound::collectives_per_step)}) {
    entry[name] = json_of(own.median(part));
  }
  entry["memory"] = {{"grads", json_of(own.median(&BenchRound::grads_mib))},
                     {"growth", json_of(own.median(&BenchRound::growth_mib))},
                     {"params", json_of(own.median(&BenchRound::params_mib))},
                     {"peak", median_of(reports, "memory", "rss_peak_mib")},
                     {"pss", median_of(reports, "memory", "pss_mib")},
                     {"state", json_of(own.median(&BenchRound::state_mib))}};
  // Ratio to the floor of the same implementation, and to shoal's floor.
  const auto compare = [&](const std::string& name, const StrategyFigures* base) {
    if (base == nullptr) return;
    const auto ratio = own.ratio_to(*base);
    entry[name] = ratio.median;
    entry[name + "_range"] = {ratio.min, ratio.max};
  };
  compare("ratio_to_local", bench.figures.local());
  const auto python = std::find(bench.peers.begin(), bench.peers.end(), "local");
  if (python != bench.peers.end()) {
    compare("ratio_to_python_local", &bench.figures.strategies[python - bench.peers.begin()]);
  }
  return entry;
}

}  // namespace

std::vector<std::string> measured_strategies() {
  auto names = strategy_names();
  std::erase_if(names,
                [](const auto& name) { return find_strategy(name).synchronization == Synchronization::single_rank; });
  return names;
}

void TrainingBenchOptions::validate() const {
  std::vector<std::string> faults;
  const auto known = measured_strategies();
  for (const auto& strategy : strategies) {
    if (std::find(known.begin(), known.end(), name_of(strategy)) == known.end()) {
      faults.push_back(fmt::format("--strategies {}: choose from {}", strategy, fmt::join(known, ", ")));
    } else if (strategy != name_of(strategy) && !find_strategy(name_of(strategy)).has("topology")) {
      faults.push_back(fmt::format("--strategies {}: {} has no topology", strategy, name_of(strategy)));
    }
  }
  if (!peer_python.empty() && !std::filesystem::exists(peer_script)) {
    faults.push_back(fmt::format("--peer-script '{}': no such file; give the path of peers.py", peer_script));
  }
  if (batch < 1) faults.emplace_back("--batch must be at least 1");
  if (accumulate < 1) faults.emplace_back("--accumulate must be at least 1");
  if (steps < 4) faults.emplace_back("--steps must be at least 4: three of them warm up");
  if (!faults.empty()) throw UsageError(fmt::format("{}", fmt::join(faults, "; ")));
  train_options(*this).complete();  // what is the same for all
  for (const auto& strategy : strategies) check_contestant(strategy, *this);
}

std::optional<TrainingBench> bench_training(const TrainingBenchOptions& options, const std::string& self) {
  const auto all = contestants(options, self);
  TrainingBench bench;
  bench.reports.resize(all.size());
  for (const auto& contestant : all) {
    bench.peers.push_back(contestant.peer);
    bench.figures.strategies.push_back({.strategy = contestant.strategy,
                                        .transport = contestant.transport,
                                        .by = contestant.peer == "shoal" ? "shoal" : "python"});
  }
  Signals signals;  // until the folder has been removed
  const Scratch scratch;
  ProgressBar progress(options.rounds * static_cast<int64_t>(all.size()), {.unit = "runs"});
  for (int round = 0; round < options.rounds; ++round) {
    for (size_t i = 0; i < all.size(); ++i) {
      auto report = run(all[i], scratch, signals);
      if (!report) {
        progress.clear();
        return std::nullopt;
      }
      bench.reports[i].push_back(std::move(*report));
      bench.figures.strategies[i].rounds.push_back(round_of(bench.reports[i].back()));
      progress.update();
    }
  }
  progress.clear();
  return bench;
}

Json json_of(const TrainingBench& bench, const TrainingBenchOptions& options) {
  auto list = Json::array();
  for (size_t i = 0; i < bench.peers.size(); ++i) list.push_back(figure(bench, i, options));
  return list;
}

}  // namespace shoal::cli
