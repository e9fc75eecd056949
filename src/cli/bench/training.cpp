#include "cli/bench/training.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>

#include "cli/bench/samples.h"
#include "launch/child.h"
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
  std::vector<Json> reports;  // one per round
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
      const auto pace = find_strategy(name_of(strategy)).pace;
      const bool alone = pace == Pace::alone || pace == Pace::single;
      if (alone && transport != options.transports.front()) continue;
      Contestant one{"shoal", strategy, alone ? "none" : transport, {}, {}, {}};
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
    Contestant one{peer, peer, peer == "local" ? "none" : "gloo", {}, {}, {}};
    one.command = {options.peer_python, options.peer_script,           "--peer", name_of(peer),
                   "--world",           std::to_string(options.ranks), "--impl", options.peer_impl};
    add_topology(peer, one.command);
    one.command.insert(one.command.end(), common.begin(), common.end());
    if (options.exact_memory) one.command.emplace_back("--exact-memory");
    list.push_back(std::move(one));
  }
  return list;
}

Json run(const Contestant& contestant, const Scratch& scratch) {
  const auto report = scratch.file("report.json");
  const auto log = scratch.file("log");
  std::error_code absent;
  std::filesystem::remove(report, absent);
  std::vector<std::string> command{"sh", "-c", "log=$1; shift; exec \"$@\" > \"$log\" 2>&1", "sh", log};
  command.insert(command.end(), contestant.command.begin(), contestant.command.end());
  command.insert(command.end(), {"--json", report});
  const auto child = start_child(0, command, contestant.variables, Outlets());
  int status = 0;
  waitpid(child.pid, &status, 0);
  std::ifstream file(report);
  if (status != 0 || !file) {
    std::ifstream said(log);
    const std::string text((std::istreambuf_iterator<char>(said)), {});
    throw Error(fmt::format("{} {} failed: {}", contestant.peer, contestant.strategy,
                            text.substr(text.size() > 2000 ? text.size() - 2000 : 0)));
  }
  return Json::parse(file);
}

// Steps of all rounds, without warm-up.
Samples steps_of(const Contestant& contestant) {
  Samples samples;
  for (const auto& report : contestant.reports) {
    const auto steps = report["timing"]["step_ms"].get<std::vector<double>>();
    const auto warm_up = report["timing"].value("warm_up", 3);
    samples.values.insert(samples.values.end(), steps.begin() + std::min<size_t>(warm_up, steps.size() - 1),
                          steps.end());
  }
  return samples;
}

Json median_over_rounds(const Contestant& contestant, const char* group, const char* name) {
  Samples samples;
  for (const auto& report : contestant.reports) {
    if (!report.contains(group) || !report[group].contains(name)) return nullptr;
    const auto& value = report[group][name];
    if (value.is_null()) return nullptr;
    samples.values.push_back(value.is_array() ? *std::max_element(value.begin(), value.end()) : value);
  }
  return samples.median();
}

// Ratio of the medians to those of `base`, round by round.
Samples ratios(const Contestant& contestant, const Contestant& base) {
  Samples samples;
  for (size_t round = 0; round < contestant.reports.size(); ++round) {
    const double own = contestant.reports[round]["timing"]["median_ms"];
    samples.values.push_back(own / base.reports[round]["timing"]["median_ms"].get<double>());
  }
  return samples;
}

Json figure(const Contestant& contestant, const std::vector<Contestant>& all, const TrainingBenchOptions& options) {
  const auto steps = steps_of(contestant);
  Json entry{{"strategy", contestant.strategy},
             {"peer", contestant.peer},
             {"transport", contestant.transport},
             {"model", options.model},
             {"size", options.size},
             {"ranks", options.ranks},
             {"dtype", "float32"},
             {"optimizer", options.optimizer}};
  entry["step_ms"] = {{"min", steps.min()}, {"median", steps.median()}, {"max", steps.max()}};
  for (const auto& report : contestant.reports) {
    entry["median_ms_per_round"].push_back(report["timing"]["median_ms"]);
  }
  for (const char* name : {"compute_ms", "exposed_comm_ms", "update_ms"}) {
    entry[name] = median_over_rounds(contestant, "timing", name);
  }
  entry["wire_bytes_per_step"] = median_over_rounds(contestant, "communication", "wire_bytes_per_step");
  entry["collectives_per_step"] = median_over_rounds(contestant, "communication", "collectives_per_step");
  for (const auto& [name, from] : std::map<std::string, const char*>{{"params", "params_mib"},
                                                                     {"grads", "grads_mib"},
                                                                     {"state", "state_mib"},
                                                                     {"peak", "rss_peak_mib"},
                                                                     {"pss", "pss_mib"},
                                                                     {"growth", "growth_mib"}}) {
    entry["memory"][name] = median_over_rounds(contestant, "memory", from);
  }
  // Ratio to the floor of the same implementation, and to shoal's floor.
  const auto floor_of = [&](const std::string& peer) {
    return std::find_if(all.begin(), all.end(),
                        [&](const Contestant& other) { return other.strategy == "local" && other.peer == peer; });
  };
  if (const auto base = floor_of("shoal"); base != all.end()) {
    const auto ratio = ratios(contestant, *base);
    entry["ratio_to_local"] = ratio.median();
    entry["ratio_to_local_range"] = {ratio.min(), ratio.max()};
  }
  if (const auto base = floor_of("local"); base != all.end()) {
    const auto ratio = ratios(contestant, *base);
    entry["ratio_to_python_local"] = ratio.median();
    entry["ratio_to_python_local_range"] = {ratio.min(), ratio.max()};
  }
  return entry;
}

}  // namespace

void TrainingBenchOptions::validate() const {
  std::vector<std::string> faults;
  const auto known = strategy_names();
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
  if (accumulate < 1) faults.emplace_back("--accumulate must be at least 1");
  if (steps < 4) faults.emplace_back("--steps must be at least 4: three of them warm up");
  if (!faults.empty()) throw UsageError(fmt::format("{}", fmt::join(faults, "; ")));
}

Json bench_training(const TrainingBenchOptions& options, const std::string& self) {
  auto all = contestants(options, self);
  const Scratch scratch;
  const auto total = options.rounds * static_cast<int64_t>(all.size());
  ProgressBar progress(total, {.unit = "runs"});
  int64_t done = 0;
  for (int round = 0; round < options.rounds; ++round) {
    for (auto& contestant : all) {
      contestant.reports.push_back(run(contestant, scratch));
      progress.update();
      ++done;
    }
  }
  progress.clear();
  auto list = Json::array();
  for (const auto& contestant : all) list.push_back(figure(contestant, all, options));
  return list;
}

}  // namespace shoal::cli
