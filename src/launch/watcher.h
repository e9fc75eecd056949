#pragma once
// Watcher process, which outlives its launcher briefly to end what the job has left behind.

#include <sys/types.h>

#include <string>

namespace shoal {

// Forks the watcher, which waits until this object, or the process that made it, is gone for whatever reason. Then it
// ends the registered process groups and all processes of the job (leftovers.h). Make it before there are threads.
class Watcher {
 public:
  explicit Watcher(const std::string& job);
  // Waits until everything is ended. Ends the processes of the job itself if the watcher cannot.
  ~Watcher();
  Watcher(const Watcher&) = delete;
  Watcher& operator=(const Watcher&) = delete;

  // Registers and removes a rank's process group. False if the watcher has ended: somebody has killed it.
  bool add(pid_t group) const;
  bool remove(pid_t group) const;
  // -1 once it is reaped.
  pid_t pid() const { return pid_; }
  // Takes note that it has ended, as somebody has killed it.
  void reap();

 private:
  bool tell(pid_t group) const;

  const std::string job_;
  int socket_ = -1;
  pid_t pid_ = -1;
};

}  // namespace shoal
