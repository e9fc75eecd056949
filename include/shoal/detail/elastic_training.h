#pragma once
// Wrapper and optimizer in one object, as Elastic takes them.

#include <torch/optim/optimizer.h>

#include <string>
#include <vector>

#include "shoal/detail/data_parallel.h"
#include "shoal/group.h"
#include "shoal/precision.h"

namespace shoal {

class LocalUpdates;

// Base of TrainingCore (shoal/training.h).
class ElasticTraining {
 public:
  virtual ~ElasticTraining() = default;
  virtual torch::optim::Optimizer& optimizer() = 0;

 protected:
  friend class ElasticAccess;  // src/elastic/access.h
  // UsageError that names what cannot outlive a rank.
  virtual void require_elastic() = 0;
  // The wrapper; nullptr without one.
  virtual DataParallelCore* data_parallel() { return nullptr; }
  // Where ranks exchange parameters; nullptr: they reduce gradients.
  virtual LocalUpdates* local_updates() { return nullptr; }
  // Its loss scaler, unless the optimizer has one; nullptr: none.
  virtual GradScaler* loss_scaler() { return nullptr; }
  // What ranks must have in common beside wrapper and optimizer, one line each.
  virtual std::vector<std::string> description() const = 0;
  // What a step communicates between gradients and update, which the update then leaves out. Collective.
  virtual void prepare_step() {}
  // Wrapper and optimizer are about to leave their groups, until follow().
  virtual void leave_groups() {}
  // The group that wrapper and optimizer are in now.
  virtual void follow(const Group& group) = 0;
};

}  // namespace shoal
