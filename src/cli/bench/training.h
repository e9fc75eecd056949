#pragma once
// Bench of whole training steps of strategies, transports and Python peers, in turn in every round.

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "shoal/bench.h"

namespace shoal::cli {

struct TrainingBenchOptions {
  std::vector<std::string> strategies = {"local", "ddp"};
  std::vector<std::string> transports = {"host", "tcp", "gloo"};
  std::vector<std::string> peers = {"local", "ddp_view"};  // of peers.py, with peer_python
  std::string peer_python;                                 // interpreter that imports torch; empty: no peers
  std::string peer_script;                                 // peers.py
  std::string peer_impl = "default";                       // of its optimizer: default, foreach, fused
  std::string model = "gpt";
  std::string size = "tiny";
  std::string optimizer = "adamw";
  int ranks = 2;
  int threads = 1;
  int batch = 4;
  int accumulate = 1;
  bool exact_memory = false;  // malloc returns freed blocks at once
  int steps = 13;
  int rounds = 3;

  // UsageError lists all faults.
  void validate() const;
};

// Valid names in `strategies`, before a topology.
std::vector<std::string> measured_strategies();

struct TrainingBench {
  StrategyBench figures;
  std::vector<std::string> peers;                            // of each contestant: "shoal" or a peer of peers.py
  std::vector<std::vector<nlohmann::ordered_json>> reports;  // of each contestant: one per round
};

// Starts every contestant once per round as a separate program. self: this program. Nothing: a signal asked to stop.
std::optional<TrainingBench> bench_training(const TrainingBenchOptions& options, const std::string& self);
nlohmann::ordered_json json_of(const TrainingBench& bench, const TrainingBenchOptions& options);

}  // namespace shoal::cli
