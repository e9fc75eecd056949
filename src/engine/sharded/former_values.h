#pragma once
// What float32 copies of rounded parameters take of what programs write to these.

#include <torch/types.h>

#include <memory>

namespace shoal {

// Takes over elements that differ from their rounded copy; others keep the copy's precision.
void take_written(const at::Tensor& elements, const at::Tensor& copy);

// Values of a float32 copy at the last update, kept from the first change by the program on. Elements that come back to what was shown
// then, as after an evaluation with averages in their place, get back the bits that they cannot hold. An element has come back if it had
// another value meanwhile, or if its parameter has been given other memory: a write in place leaves most elements alone. Copies of this
// object are one.
class FormerValues {
 public:
  // As take_written().
  void take(const at::Tensor& elements, const at::Tensor& copy) const;
  // The elements of the next take() lie in memory that the program has given to the parameter.
  void note_replaced() const { state_->replaced = true; }
  // `copy` gets values in another dtype than the parameter's, which may have more bits. The next take() is of their rounded ones.
  void give(const at::Tensor& values, const at::Tensor& copy) const;
  // What take() would make of `copy`, which is another tensor with the values of the float32 copy.
  void show(const at::Tensor& elements, const at::Tensor& copy, bool replaced) const;
  void drop() const { *state_ = {}; }

 private:
  struct State {
    at::Tensor values{};
    bool given = false;
    bool replaced = false;
  };
  void keep(const at::Tensor& copy) const;
  void drop_if(const at::Tensor& copy) const;

  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace shoal
