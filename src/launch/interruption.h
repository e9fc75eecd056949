#pragma once
// State of a job that was told to stop.

#include <chrono>
#include <optional>

#include "launch/signals.h"

namespace shoal {

class Interruption {
 public:
  // Exit code of a rank that has saved and ended after a signal, and of its job.
  static constexpr int ended_well = 130;

  // failure: exit code of a job that a rank's failure ends already; it stays.
  void begin(std::optional<int> failure);
  bool began() const { return began_.has_value(); }
  bool after_failure() const { return failure_.has_value(); }
  // Whether somebody asks once more, and does not want to wait. Signals within a second are one request: `timeout`
  // sends its signal to the program and to the program's group, and a shell that is hung up passes on what the kernel
  // sends, too.
  bool is_repeated_by(const Signals::Asked& asked) const;
  // The ranks get no more time, once this is called.
  void force() { forced_ = true; }
  bool forced() const { return forced_; }

  // A rank of the job has ended. Whether it has ended well.
  bool note_end(int code);
  // Of the job: that of the failure, or of the first rank that has not ended well, and perhaps not saved.
  int code() const { return failure_ ? *failure_ : bad_end_.value_or(ended_well); }

 private:
  std::optional<std::chrono::steady_clock::time_point> began_;
  std::optional<int> failure_;
  std::optional<int> bad_end_;
  bool forced_ = false;
};

}  // namespace shoal
