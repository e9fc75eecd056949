#include "tests/conformance/behaviours.h"

namespace shoal::test {

const Behaviours& behaviours() {
  static const Behaviours all = [] {
    Behaviours list;
    for (const auto& theme :
         {loading(), zeroing(), clipping(), editing(), step_orders(), evaluating(), failing(), freezing(), autograd(),
          wrapping(), surroundings(), saving(), weighing(), keeping(), recomputing(), programs_gans(),
          programs_gradients(), programs_sequences(), programs_transfer()}) {
      list.insert(list.end(), theme.begin(), theme.end());
    }
    return list;
  }();
  return all;
}

}  // namespace shoal::test
