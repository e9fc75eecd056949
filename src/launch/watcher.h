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
  // Waits until everything is ended.
  ~Watcher();
  Watcher(const Watcher&) = delete;
  Watcher& operator=(const Watcher&) = delete;

  // Registers and removes a rank's process group.
  void add(pid_t group) const;
  void remove(pid_t group) const;

 private:
  void tell(pid_t group) const;

  int pipe_ = -1;
  pid_t pid_ = -1;
};

}  // namespace shoal
