#pragma once
// Merge of the program's writes into float32 copies of rounded parameters.

#include <torch/types.h>

#include <memory>

namespace shoal {

// Takes over elements that differ from their rounded copy; others keep the copy's precision.
void take_written(const at::Tensor& elements, const at::Tensor& copy);

// Values of a float32 copy at the last update, kept from the first change by the program on. Elements that come back to
// what was shown then, as after an evaluation with averages in their place, get back the bits that they cannot hold. An
// element has come back if it had another value meanwhile, or if its parameter has been given other memory: a write in
// place leaves most elements alone. Copies of this object are one.
class FormerValues {
 public:
  // As take_written(). replaced: `elements` lie in memory that the program has given to the parameter.
  void take(const at::Tensor& elements, const at::Tensor& copy, bool replaced = false) const;
  // In place of take(): `copy` gets values in another dtype than the parameter's, which may have more bits.
  void give(const at::Tensor& values, const at::Tensor& copy) const;
  // What take() would make of `copy`, which is another tensor with the values of the float32 copy.
  void show(const at::Tensor& elements, const at::Tensor& copy, bool replaced) const;
  void drop() const { former_->reset(); }

 private:
  void keep(const at::Tensor& copy) const;
  void drop_if(const at::Tensor& copy) const;

  std::shared_ptr<at::Tensor> former_ = std::make_shared<at::Tensor>();  // undefined: nothing is kept
};

}  // namespace shoal
