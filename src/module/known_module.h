#pragma once
// A module may change after a wrapper has taken it: replace_module() and register_parameter() give it parameters that
// the wrapper does not know.

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

namespace shoal {

// The parameters of a module at the construction, its ignored ones and those of wrapped parts too. Keeps the module and
// them. Asking walks the module's tree, some tens of nanoseconds per module.
class KnownModule {
 public:
  KnownModule() = default;
  // owner: the class that has taken the module, for errors.
  KnownModule(std::shared_ptr<const torch::nn::Module> module, std::string owner);

  // UsageError that names a trainable parameter that was not there: each rank would train it by itself.
  void require_no_other() const;

 private:
  std::shared_ptr<const torch::nn::Module> module_;
  std::string owner_;
  std::vector<at::Tensor> parameters_;
};

}  // namespace shoal
