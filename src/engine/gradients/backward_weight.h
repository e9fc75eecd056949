#pragma once
// Weight of the backward(loss_sum, weight) that is under way, for the other wrappers whose modules it goes through.

#include <c10/util/ThreadLocalDebugInfo.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

namespace shoal {

// Scope of a weighted backward. All gradients that it computes are of the same sum over samples, so that each wrapper
// divides by the weight, whichever of them was called.
//
// Kept where libtorch keeps debug info: autograd hands that to its threads, one per device and for deep reentrant
// backwards.
class BackwardWeightScope {
 public:
  struct Info : c10::DebugInfoBase {
    explicit Info(double of_loss) : weight(of_loss), number(next_number()) {}
    double weight;
    uint64_t number;  // of the scope; never 0
  };

  explicit BackwardWeightScope(double weight) : guard_(kind(), std::make_shared<Info>(weight)) {}

  // Of this thread's innermost scope; nullptr outside.
  static const Info* get() { return static_cast<const Info*>(c10::ThreadLocalDebugInfo::get(kind())); }

 private:
  static c10::DebugInfoKind kind() {
    static constexpr std::string_view name = "shoal::BackwardWeightScope";
    return c10::DebugInfoKind(&name);
  }
  static uint64_t next_number() {
    static std::atomic<uint64_t> last = 0;
    return ++last;
  }

  c10::DebugInfoGuard guard_;
};

// Whether a wrapper has counted a weight that was given to another one; a backward may begin several times in it.
class OuterBackwardWeight {
 public:
  // Calls add(weight) once per scope. False outside of one.
  template <class Add>
  bool take(const Add& add) {
    const auto* info = BackwardWeightScope::get();
    if (info == nullptr) return false;
    if (std::exchange(taken_, info->number) != info->number) {
      spent_.reset();
      add(info->weight);
    }
    return true;
  }

  // A step has ended that may be one of several of this backward, each with the same weight.
  void spend(const std::optional<double>& weight) { spent_ = weight; }
  const std::optional<double>& spent() const { return spent_; }

 private:
  uint64_t taken_ = 0;
  std::optional<double> spent_{};
};

}  // namespace shoal
