#pragma once
// Functions of wrappers and optimizers that only Join calls, for classes that pass its calls on.

#include <optional>

#include "shoal/join.h"

namespace shoal {

// See Joinable.
class JoinAccess {
 public:
  static void check_shadow(const Joinable& joinable) { joinable.check_shadow(); }
  static void settle(Joinable& joinable) { joinable.settle(); }
  static void set_join_state(Joinable& joinable, const std::optional<JoinState>& join_state) {
    joinable.set_join_state(join_state);
  }
  static void broadcast_model(Joinable& joinable, int rank) { joinable.broadcast_model(rank); }
};

}  // namespace shoal
