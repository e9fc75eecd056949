#pragma once
// Param groups' options in checkpoints, by the names of the groups' parameters.

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/checkpoint/source.h"

namespace shoal {

// The groups of all optimizers of `view`; null: there is none.
nlohmann::json stored_options(const CheckpointView& view);

// Options of a checkpoint on their way to the groups of `view`, which must outlive it. Groups need not be cut as they
// were there: those of a group's parameters count, if they are equal.
class OptionsLoader {
 public:
  // stored: what stored_options() gave. Json's errors, and UsageError for values that options cannot take; nothing has
  // changed then.
  OptionsLoader(const CheckpointView& view, const nlohmann::json& stored);

  // rates: learning rates; others: all other options.
  void apply(bool rates, bool others) const;
  // One sentence for each group and option that is not as in the checkpoint now.
  std::vector<std::string> differences() const;

 private:
  struct Match {
    std::string name;  // of the group here
    torch::optim::OptimizerParamGroup* group;
    const nlohmann::json* stored;  // none: they were in groups with different options
  };
  nlohmann::json stored_;
  std::vector<Match> matches_;
};

}  // namespace shoal
