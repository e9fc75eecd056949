#pragma once
// Agreement of all ranks on a step of an optimizer.

#include <torch/optim/optimizer.h>

#include <string>
#include <vector>

#include "shoal/group.h"

namespace shoal::python {

using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;

// Compares the options of param groups over ranks, and tells all ranks if one has failed.
class StepAgreement {
 public:
  // owner: the class of the optimizer, for errors.
  StepAgreement(Group group, std::string owner) : group_(std::move(group)), owner_(std::move(owner)) {}

  // groups: with PythonOptions. failure: what this rank's optimizer has raised; empty: nothing. StepAbandoned on ranks
  // that have not failed if one has; DisagreeError on every rank if an option differs. Costs one all-gather of 8 bytes
  // if ranks agree. Collective; call it without the lock.
  void meet(const ParamGroups& groups, const std::string& failure) const;

  // In an elastic job ranks agree before a step's commit, because an update must not communicate, and steps of the
  // optimizer do not any more. group: of the present ranks.
  void move_before_commit(Group group) {
    group_ = std::move(group);
    before_commit_ = true;
  }
  void move_back() { before_commit_ = false; }
  const Group& group() const { return group_; }
  bool before_commit() const { return before_commit_; }

 private:
  Group group_;
  std::string owner_;
  bool before_commit_ = false;
};

}  // namespace shoal::python
