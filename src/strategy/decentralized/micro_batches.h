#pragma once
// Gradients that backwards under no_sync() have left in grad(), to notice that the program has dropped them.

#include <cstdint>
#include <vector>

#include "engine/buckets/bucket_plan.h"
#include "memory/tensor_version.h"

namespace shoal {

class MicroBatches {
 public:
  // The reference must outlive this object.
  explicit MicroBatches(const std::vector<Gradient>& gradients) : gradients_(gradients), left_(gradients.size()) {}

  // Such a backward has added to a gradient.
  void add(size_t gradient);
  // Call at the end of such a backward, which may have given zeros that the program has not written. look: distinguish
  // them; without, they count as dropped.
  void note_values(bool look);
  // Whether the program has since dropped or zeroed all that they have left; false if they have left nothing.
  bool dropped() const;
  void forget();

 private:
  struct Left {
    bool some = false;
    TensorVersion version{};  // at the end of the last such backward
  };
  bool has_values(size_t gradient) const;
  // Whether the program has written to the gradient, or replaced it.
  bool changed(size_t gradient) const { return !left_[gradient].version.is_of(gradients_[gradient].parameter.grad()); }

  const std::vector<Gradient>& gradients_;
  std::vector<Left> left_;
  bool any_ = false;
  bool nonzero_ = false;  // at the end of the last such backward, as far as was looked
};

}  // namespace shoal
