#pragma once
// Options of param groups in checkpoints, by the names of the groups' parameters.

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "engine/checkpoint/source.h"

namespace shoal {

// Options of all optimizers' groups in `view`; null if there are none.
nlohmann::json stored_options(const CheckpointView& view);

// Applies a checkpoint's options to the groups of `view`, which must outlive this object. Groups may be composed
// differently here: a group takes the stored options of its parameters, where they have
// some, if those agree.
class OptionsLoader {
 public:
  // stored: result of stored_options(). Throws nlohmann::json's errors, and UsageError for values that the options
  // cannot take, before anything has changed.
  OptionsLoader(const CheckpointView& view, const nlohmann::json& stored);

  // UsageError for the options of another of PyTorch's optimizers, whose state would be taken as it is. Those of Adam
  // and AdamW are alike.
  void require_kin() const;
  // rates: learning rates; others: all other options.
  void apply(bool rates, bool others) const;
  // One sentence for each group and option that now differs from the checkpoint.
  std::vector<std::string> differences() const;

 private:
  struct Match {
    std::string name;  // of the group here
    torch::optim::OptimizerParamGroup* group;
    const nlohmann::json* stored;  // nullptr: the parameters were in groups with different options
  };
  nlohmann::json stored_;
  std::vector<Match> matches_;
  std::vector<std::string> unknown_;  // groups of trainable parameters of which the checkpoint knows none
};

}  // namespace shoal
