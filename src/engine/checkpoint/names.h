#pragma once
// Names of tensors and entries in a checkpoint of a training.

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <vector>

#include "engine/sharded/sharded_state.h"

namespace shoal::checkpoint_names {

constexpr const char* optimizer_part = "optimizer";
constexpr const char* ranks_part = "ranks";
constexpr const char* strategy_part = "strategy";

// Entries of a rank's state, and of all ranks'.
constexpr const char* numbers = "optimizer";  // {PARAMETER: {FIELD: number}}, what is not a tensor
constexpr const char* position = "position";
constexpr const char* carried = "strategy";
constexpr const char* trained = "trained";  // names of the parameters that optimizers update
constexpr const char* param_groups = "param_groups";  // [{"parameters": names, "type": of the options, "options": ...}]
constexpr const char* rates = "rates";  // by param group; in checkpoints of before there were param_groups
constexpr const char* scaler = "scaler";
constexpr const char* schedule = "schedule";    // steps of the strategy's own schedules, else of the first companion
constexpr const char* schedules = "schedules";  // of the companions, one object each

inline std::string state_tensor(const std::string& parameter, const std::string& field) {
  return fmt::format("optimizer.{}.{}", parameter, field);
}

// What a strategy carries; the colon keeps it apart from the model's names.
inline std::string carried_tensor(const std::string& name) {
  return fmt::format("strategy:{}", name);
}

// What is one rank's alone.
inline std::string of_rank(int rank, const std::string& name) {
  return fmt::format("ranks.{}.{}", rank, name);
}

}  // namespace shoal::checkpoint_names

namespace shoal {

// The order of dimensions in which a parameter's elements lie in memory, as NamedSlice has it.
std::vector<int64_t> memory_order(const at::Tensor& parameter);

}  // namespace shoal
