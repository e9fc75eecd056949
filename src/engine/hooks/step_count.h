#pragma once
// Step counter of a hook.

#include <torch/types.h>

#include "shoal/hooks.h"

namespace shoal {

class StepCount {
 public:
  // Number, from 0, of the step that labels call `labelled`.
  int64_t at(int64_t labelled) {
    if (labelled != labelled_) ++begun_;
    labelled_ = labelled;
    return begun_ - 1;
  }

  // Saves the count in a hook's state as "steps".
  void save(CommunicationHook::State& state) const { state[name] = at::full({}, begun_, at::kLong); }
  // Loads an entry of the state. False if it is not the count.
  bool load(const std::string& entry, const at::Tensor& value) {
    if (entry != name) return false;
    begun_ = value.item<int64_t>();
    return true;
  }

 private:
  static constexpr const char* name = "steps";
  int64_t begun_ = 0;
  int64_t labelled_ = -1;
};

}  // namespace shoal
