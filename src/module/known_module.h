#pragma once
// Detection of parameters that a module gained after a wrapper took it, by replace_module() or register_parameter().

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

namespace shoal {

// The parameters that a module had at construction, including ignored ones and those of wrapped parts. Keeps the module
// and the parameters alive. A check walks the module's tree, in some tens of nanoseconds per module.
class KnownModule {
 public:
  KnownModule() = default;
  // owner: class of the wrapper, for errors.
  KnownModule(std::shared_ptr<const torch::nn::Module> module, std::string owner);

  const std::string& owner() const { return owner_; }
  // UsageError that names a trainable parameter which is new: each rank would train it on its own.
  void require_no_other() const;

 private:
  std::shared_ptr<const torch::nn::Module> module_;
  std::string owner_;
  std::vector<at::Tensor> parameters_;
};

}  // namespace shoal
