#pragma once
// Position of a rank's loop in its passes through the samples.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

namespace shoal {

struct EpochPosition {
  size_t taken = 0;               // places of the epoch behind which the rest begins
  size_t skipped = 0;             // behind those: of steps that this rank has left by an error
  std::optional<size_t> epoch{};  // the sampler's, within a pass
  int64_t pass = 0;               // passes through the samples that this rank has begun, whatever their epoch's number
  int64_t passes_over = 0;        // of them, those that some rank has ended, as of the last recovery
  bool asks = false;              // this rank has called in_epoch()
  bool outdated = false;          // the loader's division is the former world's

  bool is_in(size_t wanted) const { return epoch && *epoch == wanted; }
  // Where the next step begins.
  size_t next_place() const { return taken + skipped; }
  // Grows as this rank begins and ends passes, and as it learns that others have: odd within a pass.
  int64_t progress() const { return std::max(2 * pass - (epoch ? 1 : 0), 2 * passes_over); }

  // begin: places of the epoch before which it does not train.
  void begin_pass(size_t begin) {
    ++pass;
    taken = begin;
    skipped = 0;
  }
  // The pass goes on as one through this epoch, from its beginning.
  void change_epoch(size_t to) {
    epoch = to;
    taken = skipped = 0;
  }
  void complete_step(int64_t places) { taken += std::exchange(skipped, 0) + static_cast<size_t>(places); }
  void skip_step(int64_t places) { skipped += static_cast<size_t>(places); }
  // Samples behind this place, which another rank has not taken, are done again.
  void go_back_to(int64_t place) { taken = std::min(taken + std::exchange(skipped, 0), static_cast<size_t>(place)); }
};

}  // namespace shoal
