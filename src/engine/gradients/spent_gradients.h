#pragma once
// What lies in grad() where backward has used a gradient for its update.

#include <string>
#include <vector>

#include "engine/gradients/stand_ins.h"

namespace shoal {

// A loop that clips, scales or logs gradients after such a backward would find none, and go on as if there was nothing
// to do. So it finds stand-ins, until the next backward. They can be zeroed and dropped, all of them, as every
// zero_grad does; what does that to some only would have them left out of an update that has been made.
class SpentGradients {
 public:
  // The reference stays. who: whose update, for errors; about: see StandIns.
  SpentGradients(const std::vector<Gradient>& gradients, std::string who, std::string about);

  // At the end of a backward that has used it.
  void leave(size_t gradient);
  // Before anything comes: none is in grad() any more. UsageError, once, where some of the last update's have been
  // zeroed or dropped, and others of trainable parameters not.
  void clear();

 private:
  enum class Fate { untouched, dropped, zeroed, replaced };
  Fate fate(size_t gradient) const;
  void refuse(size_t touched, size_t untouched) const;

  const std::vector<Gradient>& gradients_;
  std::string who_;
  StandIns stand_ins_;
  std::vector<bool> left_;  // in the last update
  bool any_ = false;
};

}  // namespace shoal
