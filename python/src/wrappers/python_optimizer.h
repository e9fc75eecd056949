#pragma once
// A torch.optim.Optimizer of Python as an optimizer of libtorch: over parameters that shoal chooses, or over those it
// has.

#include <torch/optim/optimizer.h>

#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "wrappers/gil.h"
#include "wrappers/python_numbers.h"
#include "wrappers/python_options.h"
#include "wrappers/step_agreement.h"

namespace shoal::python {

// Who decides on options: the param groups of this object, or those of the Python optimizer.
enum class OptionsOf { libtorch, python };

class PythonOptimizer : public torch::optim::Optimizer {
 public:
  // `make` makes the Python optimizer from a list of param groups, which may have no parameters.
  // `agreement`: of all ranks on each step, which is then collective; none: ranks step for themselves.
  static std::unique_ptr<PythonOptimizer> make(const ParamGroups& groups, const SharedObject& make,
                                               std::shared_ptr<StepAgreement> agreement,
                                               std::shared_ptr<NumberKinds> kinds);
  // A Python optimizer that exists, over its own parameters. Who uses this one keeps it. Call it with the lock.
  static std::unique_ptr<PythonOptimizer> over(const py::object& optimizer);

  // Each step asks `source` for the options first. Call it with the lock.
  void follow(std::function<void(ParamGroups&)> source) { source_ = std::move(source); }
  // With an agreement, an error of any rank waits for raise_failure(), so that all ranks can end their step alike.
  at::Tensor step(LossClosure closure = nullptr) override;
  void raise_failure();

  // Copies the Python optimizer's options and state to this object's, and back. Call them with the lock.
  void read();
  void write();
  void write_state();  // without the options, whose objects a program may hold, such as a rate that is a tensor

  // UsageError for state that is not a parameter's, which neither newcomers nor a rank that finishes another one's
  // update would have. Call it with the lock.
  void require_state_of_parameters() const;

  py::object python() const;
  StepAgreement* agreement() const { return agreement_.get(); }
  // What is known of numbers so far. Numbers of a state that is loaded are the same in Python, or tensors of float32.
  NumberKinds& kinds() const { return *kinds_; }

 private:
  PythonOptimizer(SharedObject object, OptionsOf options_of, std::unique_ptr<PythonOptions> defaults);
  void step_alone();
  void write_parameters();
  void read_options();
  void write_options();
  void read_state();
  void learn_kinds();

  SharedObject python_;  // weak if it is the program's
  OptionsOf options_of_;
  std::shared_ptr<StepAgreement> agreement_;
  std::shared_ptr<NumberKinds> kinds_ = std::make_shared<NumberKinds>();
  bool knows_kinds_ = false;
  std::function<void(ParamGroups&)> source_;
  std::exception_ptr failure_;
  std::map<void*, SharedObject> known_;  // parameters whose state was read or written
};

// Registers the state of PythonOptimizer for sharding and checkpoints.
void register_python_state();

}  // namespace shoal::python
