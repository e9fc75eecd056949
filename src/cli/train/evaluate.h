#pragma once
// Evaluation of a built-in model.

#include "data/dataset.h"
#include "models/model.h"
#include "shoal/group.h"
#include "shoal/precision.h"

namespace shoal::cli {

struct Evaluation {
  double loss = 0;      // mean cross entropy per sample or position
  double accuracy = 0;  // fraction of correct answers, per sample or position
  int64_t count = 0;    // samples or positions
};

// Evaluates all of `samples`, distributed over the group's ranks. Collective. Restores the module's training mode.
Evaluation evaluate(models::Model& model, data::Dataset& samples, const Group& group, const Precision& precision);

}  // namespace shoal::cli
