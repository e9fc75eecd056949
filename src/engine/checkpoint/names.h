#pragma once
// Names of tensors and entries in a training's checkpoint.

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <vector>

#include "engine/sharded/sharded_state.h"

namespace shoal::checkpoint_names {

constexpr const char* optimizer_part = "optimizer";
constexpr const char* ranks_part = "ranks";
constexpr const char* strategy_part = "strategy";

// Entries of one rank's state, and of the state that all ranks share.
constexpr const char* numbers = "optimizer";  // {PARAMETER: {FIELD: number}}: state that is not a tensor
constexpr const char* position = "position";
constexpr const char* carried = "strategy";
constexpr const char* trained = "trained";            // names of the parameters that optimizers update
constexpr const char* param_groups = "param_groups";  // [{"parameters": names, "type": of the options, "options": ...}]
constexpr const char* rates = "rates";  // learning rates by param group; in checkpoints older than param_groups
constexpr const char* scaler = "scaler";
constexpr const char* schedule = "schedule";    // steps of the strategy's own schedules, else of the first companion
constexpr const char* schedules = "schedules";  // of the companions, one object each

inline std::string state_tensor(const std::string& parameter, const std::string& field) {
  return fmt::format("optimizer.{}.{}", parameter, field);
}

// Tensor that a strategy carries; the colon keeps it apart from the model's names.
inline std::string carried_tensor(const std::string& name) {
  return fmt::format("strategy:{}", name);
}

// Tensor of one rank alone.
inline std::string of_rank(int rank, const std::string& name) {
  return fmt::format("ranks.{}.{}", rank, name);
}

}  // namespace shoal::checkpoint_names

namespace shoal {

// Order of dimensions in which a parameter's elements lie in memory, as in NamedSlice.
std::vector<int64_t> memory_order(const at::Tensor& parameter);

}  // namespace shoal
