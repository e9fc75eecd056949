#pragma once
// A torch.optim.Optimizer of Python as an optimizer of libtorch: over parameters that shoal chooses, or over those it has.

#include <torch/optim/optimizer.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "optim/named_options.h"
#include "wrappers/gil.h"

namespace shoal::python {

using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;

// Options of a param group by name: numbers, booleans, strings, None and tuples of them.
class PythonOptions : public torch::optim::OptimizerCloneableOptions<PythonOptions>, public OptionsOfType {
 public:
  using Values = std::map<std::string, c10::IValue>;

  PythonOptions() = default;
  // From a param group. `optimizer`: name of its class; in checkpoints, options of optimizers that libtorch has are of
  // libtorch's type. UsageError for a value of another kind.
  PythonOptions(const py::dict& group, std::string optimizer);

  // Writes the options to a param group. Call it with the lock.
  void write_to(const py::dict& group) const;
  const std::string& optimizer() const { return optimizer_; }
  std::string type() const override;

  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override;
  void set_lr(double lr) override;

 private:
  Values values_;
  std::string optimizer_;
};

// Who decides on options: the param groups of this object, or those of the Python optimizer.
enum class OptionsOf { libtorch, python };

class PythonOptimizer : public torch::optim::Optimizer {
 public:
  // `make` makes the Python optimizer from a list of param groups, which may have no parameters.
  static std::unique_ptr<PythonOptimizer> make(const ParamGroups& groups, const SharedObject& make);
  // A Python optimizer that exists, over its own parameters. Call it with the lock.
  static std::unique_ptr<PythonOptimizer> over(py::object optimizer);

  at::Tensor step(LossClosure closure = nullptr) override;

  // Copies the Python optimizer's options and state to this object's, and back. Call them with the lock.
  void read();
  void write();

  const py::object& python() const { return *python_; }

 private:
  PythonOptimizer(SharedObject python, OptionsOf options_of, std::unique_ptr<PythonOptions> defaults);
  void read_options();
  void write_options();
  void read_state();
  void write_state();

  SharedObject python_;
  OptionsOf options_of_;
  std::vector<void*> known_;  // parameters whose state was read or written
};

// Registers the state of PythonOptimizer for sharding and checkpoints.
void register_python_state();

}  // namespace shoal::python
