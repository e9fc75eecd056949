#pragma once
// Guard against silent connections, with which strangers could exhaust the store's process.

#include <atomic>
#include <thread>

namespace shoal {

// Ends connections to this process's port that have got no answer for ten seconds: a client of the store sends a
// request at once, so that such connections have sent none, or only a part. c10d's server, which accepted them, sees an
// ordinary disconnect. Also raises the process's limit of open files, if the system allows it.
class IdleConnectionReaper {
 public:
  explicit IdleConnectionReaper(int port);
  ~IdleConnectionReaper();
  IdleConnectionReaper(const IdleConnectionReaper&) = delete;
  IdleConnectionReaper& operator=(const IdleConnectionReaper&) = delete;

 private:
  void run(int port) const;

  std::atomic<bool> ended_ = false;
  std::thread thread_;
};

}  // namespace shoal
