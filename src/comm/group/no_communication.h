#pragma once
// A scope in which this thread must not communicate.

#include <string>

namespace shoal {

struct Call;

// While it lives, calls of this thread on groups of several ranks are a UsageError. Scopes do not nest.
class NoCommunication {
 public:
  // why: what follows the call's name in the error: "in the second function of ...: ...".
  explicit NoCommunication(std::string why);
  ~NoCommunication();
  NoCommunication(const NoCommunication&) = delete;
  NoCommunication& operator=(const NoCommunication&) = delete;

  // Whether a call was refused.
  bool broken() const { return broken_; }

  // For groups. Throws UsageError within such a scope of this thread.
  static void check(const Call& call, int ranks);

 private:
  std::string why_;
  bool broken_ = false;
};

}  // namespace shoal
