#pragma once
// A process that outlives its launcher by a moment, to end what the job has left behind.

#include <sys/types.h>

#include <string>

namespace shoal {

// Forks the watcher, which waits until this object, or the process that made it, is gone, in whatever way. Then it ends
// the process groups that it was told of and all processes of the job (leftovers.h). Make it before there are threads.
class Watcher {
 public:
  explicit Watcher(const std::string& job);
  // Until everything is ended.
  ~Watcher();
  Watcher(const Watcher&) = delete;
  Watcher& operator=(const Watcher&) = delete;

  // A rank's process group is there; it is gone.
  void add(pid_t group) const;
  void remove(pid_t group) const;

 private:
  void tell(pid_t group) const;

  int pipe_ = -1;
  pid_t pid_ = -1;
};

}  // namespace shoal
