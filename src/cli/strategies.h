#pragma once
// The strategies that `shoal train` knows, behind one small interface.

#include <memory>
#include <string>
#include <vector>

#include "cli/train_options.h"
#include "models/model.h"
#include "shoal/comm/group.h"

namespace shoal::cli {

// How one rank runs a micro-batch.
class Strategy {
 public:
  virtual ~Strategy() = default;
  virtual at::Tensor forward(const at::Tensor& input) = 0;
  // Backward of a micro-batch's loss; gradients are final after the last one of a step.
  virtual void backward(const at::Tensor& loss, bool last) = 0;
};

std::vector<std::string> strategy_names();
// Collective over the group, except for the strategies that do not communicate.
std::unique_ptr<Strategy> make_strategy(const TrainOptions& options, const std::shared_ptr<models::Model>& model,
                                        const Group& group);

}  // namespace shoal::cli
