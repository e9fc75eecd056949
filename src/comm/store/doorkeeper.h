#pragma once
// Keeps strangers from filling the store's process with connections that say nothing.

#include <atomic>
#include <thread>

namespace shoal {

// Ends connections to this process's port that have got no answer for ten seconds: whoever means the store asks it
// something at once, so that those have said nothing, or never a whole question. c10d's server, which has accepted
// them, sees their end as any other. And lets the process have more files open, where the system allows that.
class Doorkeeper {
 public:
  explicit Doorkeeper(int port);
  ~Doorkeeper();
  Doorkeeper(const Doorkeeper&) = delete;
  Doorkeeper& operator=(const Doorkeeper&) = delete;

 private:
  void run(int port) const;

  std::atomic<bool> ended_ = false;
  std::thread thread_;
};

}  // namespace shoal
