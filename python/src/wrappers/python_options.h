#pragma once
// Options of a param group of Python as options of libtorch.

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "optim/named_options.h"
#include "wrappers/gil.h"

namespace shoal::python {

// Options of a param group by name: numbers, booleans, strings, None and tuples of them.
// A number may be a tensor or a numpy value of one element.
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
  // Equal on ranks with equal options.
  uint64_t digest() const;
  // One line per option: "lr 0.001".
  std::vector<std::string> lines() const;

  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override;
  void set_lr(double lr) override;

 private:
  Values values_;
  std::string optimizer_;
};

// A value for Python. `like`: the value that Python has, whose kind it gets; none: whole numbers are integers, which
// serve as floats too. Call it with the lock.
py::object to_python(const c10::IValue& value, const py::handle& like);

}  // namespace shoal::python
