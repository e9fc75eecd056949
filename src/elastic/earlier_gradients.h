#pragma once
// Gradients that are there when a step begins, and to which its backwards would add.

#include <torch/nn/module.h>

#include <string>

#include "elastic/elastic_parts.h"

namespace shoal {

// Finds gradients that a step can neither keep apart from its own nor undo. Zeros are none, and neither are gradients
// that the step's own zero_grad() drops before its first backward.
class EarlierGradients {
 public:
  // parts: must outlive this object.
  explicit EarlierGradients(const ElasticParts& parts)
      : parts_(parts), parameters_(parts.module().named_parameters()) {}

  // Call when a step begins.
  void begin_step();
  // Call before each backward of the step, and at the end of its backwards.
  void check();
  // Whether gradients were there when the step began, and no backward has been seen since.
  bool untouched() const { return there_; }
  // Whether a backward has added to one of them.
  bool found() const { return !found_.empty(); }
  // UsageError on a rank that has found one, or whose peer has.
  [[noreturn]] void refuse() const;

 private:
  std::string first_of_them() const;

  const ElasticParts& parts_;
  torch::OrderedDict<std::string, at::Tensor> parameters_;
  bool there_ = false;
  std::string found_;  // name of a parameter
};

}  // namespace shoal
