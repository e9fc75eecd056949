#include "launch/interruption.h"

namespace shoal {

void Interruption::begin(std::optional<int> failure) {
  began_ = std::chrono::steady_clock::now();
  failure_ = failure;
}

// A hangup hurries nobody: it says that somebody has left.
bool Interruption::is_repeated_by(const Signals::Asked& asked) const {
  return began_ && asked.to_stop && std::chrono::steady_clock::now() - *began_ >= std::chrono::seconds(1);
}

bool Interruption::note_end(int code) {
  const bool well = code == 0 || code == ended_well;
  if (!well && !bad_end_) bad_end_ = code;
  return well;
}

}  // namespace shoal
