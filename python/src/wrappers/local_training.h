#pragma once
// LocalUpdates around an optimizer of Python.

#include <cstdint>
#include <memory>

#include "shoal/local_updates.h"
#include "wrappers/mirror.h"
#include "wrappers/python_optimizer.h"

namespace shoal::python {

struct LocalTraining {
  std::shared_ptr<Mirror> mirror;
  std::unique_ptr<PythonOptimizer> optimizer;  // which `updates` steps
  std::unique_ptr<LocalUpdates> updates;
  StepAgreement agreement;
  int64_t every;  // steps between two exchanges, with which ranks agree
};

}  // namespace shoal::python
