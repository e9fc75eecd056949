#pragma once
// Stand-ins in grad() for gradients that backward has already used for its update.

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "engine/gradients/stand_ins.h"

namespace shoal {

// A loop that clips, scales or logs gradients after such a backward would find none and silently do nothing. It finds
// stand-ins instead, until the next backward. They may be zeroed or dropped all together, as every zero_grad does.
// Doing so to some only means that the caller wants those left out of an update, which has already been made: an error.
class SpentGradients {
 public:
  // The reference must outlive this object. who: the updater, for errors; about: see StandIns.
  SpentGradients(const std::vector<Gradient>& gradients, std::string who, std::string about);

  // Call at the end of a backward that used the gradient.
  void leave(size_t gradient);
  // UsageError if some of the last update's gradients were zeroed or dropped while others of trainable parameters were
  // not.
  void check() const;
  // Call before new gradients arrive: removes the stand-ins from grad(). Throws what check() does, once.
  void clear();

 private:
  enum class Fate { untouched, dropped, zeroed, replaced };
  Fate fate(size_t gradient) const;
  // One gradient of each fate that some have had, by fate.
  using Fates = std::array<std::optional<size_t>, 4>;
  Fates fates() const;
  void refuse_mixed(const Fates& fates) const;
  void refuse(size_t touched, size_t untouched) const;

  const std::vector<Gradient>& gradients_;
  std::string who_;
  StandIns stand_ins_;
  std::vector<bool> left_;  // by gradient: used in the last update
  bool any_ = false;
};

}  // namespace shoal
