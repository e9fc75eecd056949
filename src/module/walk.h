#pragma once
// List of a module's tensors, in an order that is the same on all ranks.

#include <torch/nn/module.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

namespace shoal {

struct NamedTensor {
  std::string name;                  // name of the first occurrence
  std::vector<std::string> aliases;  // further names of the same tensor (tied weights)
  at::Tensor tensor;
  bool sparse_gradient = false;     // weight of an embedding with sparse(true)
  bool changes_in_forward = false;  // weight of an embedding with max_norm
  bool transient = false;           // a buffer that is no part of the module's state
};

// A module that has such buffers, as those of Python with persistent=False.
class HasTransientBuffers {
 public:
  virtual ~HasTransientBuffers() = default;
  // name: of a buffer of the module or one within it.
  virtual bool is_transient(const std::string& name) const = 0;
};

// A module whose buffers may get other shapes when it loads a state, as observers of quantization in Python.
class ResizesBuffers {
 public:
  using Shapes = std::map<std::string, std::vector<int64_t>>;  // in the state, by name in the module
  virtual ~ResizesBuffers() = default;
  // Gives buffers the shapes that they would get, and any values. Returns what gives them back their own.
  virtual std::function<void()> take_shapes(const Shapes& shapes) const = 0;
};

struct ModuleTensors {
  std::vector<NamedTensor> parameters;  // in registration order, each tensor once, ignored ones left out
  std::vector<NamedTensor> buffers;

  // Parameters that are trained. A tensor is one parameter, whatever its names.
  std::vector<NamedTensor> trainable() const;
  // One line per parameter and buffer: kind, name, dtype, shape, layout, trainable or frozen. For agree().
  std::vector<std::string> describe() const;
};

// UsageError if a name in `ignored` is neither a parameter nor a buffer. Any of a tensor's names ignores it.
ModuleTensors walk(const torch::nn::Module& module, const std::vector<std::string>& ignored);

}  // namespace shoal
