#pragma once
// A reference to a module, as the parameter of functions that take a module or its holder. Each is then one function,
// which auto, std::function and std::bind take.

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <cstddef>
#include <memory>

#include "shoal/error.h"

namespace shoal::detail {

// From a module, its holder (torch::nn::Sequential), std::shared_ptr or pointer (this). UsageError if these are empty.
class ModuleRef {
 public:
  template <std::convertible_to<const torch::nn::Module&> Module>
  ModuleRef(const Module& module) : module_(&static_cast<const torch::nn::Module&>(module)) {}  // NOLINT: implicit
  template <class Impl>
  ModuleRef(const torch::nn::ModuleHolder<Impl>& holder)  // NOLINT: implicit
      : ModuleRef(holder.is_empty() ? nullptr : static_cast<const torch::nn::Module*>(holder.get())) {}
  template <std::derived_from<torch::nn::Module> Module>
  ModuleRef(const std::shared_ptr<Module>& module) : ModuleRef(module.get()) {}  // NOLINT: implicit
  ModuleRef(const torch::nn::Module* module) : module_(module) {                 // NOLINT: implicit
    if (module == nullptr) throw UsageError("the module is empty (nullptr): construct it before this call");
  }
  template <std::same_as<std::nullptr_t> Null>
  ModuleRef(Null) {  // NOLINT: implicit
    static_assert(!std::same_as<Null, std::nullptr_t>, "shoal: nullptr is no module: give a module or its holder");
  }
  template <std::integral Number>
  ModuleRef(Number) = delete;  // 0 means a rank, not a null pointer

  operator const torch::nn::Module&() const { return *module_; }  // NOLINT: implicit

 private:
  const torch::nn::Module* module_ = nullptr;
};

}  // namespace shoal::detail
