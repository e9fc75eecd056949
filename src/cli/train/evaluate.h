#pragma once

#include "data/dataset.h"
#include "models/model.h"
#include "shoal/group.h"
#include "shoal/precision.h"

namespace shoal::cli {

struct Evaluation {
  double loss = 0;      // mean cross entropy per sample or position
  double accuracy = 0;  // share of right answers, per sample or position
  int64_t count = 0;    // samples or positions
};

// Over all of `samples`, shared out among the group's ranks. Collective. The module's mode is as before afterwards.
Evaluation evaluate(models::Model& model, data::Dataset& samples, const Group& group, const Precision& precision);

}  // namespace shoal::cli
