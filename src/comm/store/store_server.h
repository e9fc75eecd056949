#pragma once
// Hosts the key-value store through which the ranks of a job find each other.

#include <memory>
#include <string>

#include "comm/rendezvous/job_identity.h"

namespace shoal {

// Listens on `address` alone (a numeric address or a name of one of this host's interfaces) from construction to
// destruction, and says in the store whose job it is. port 0 takes any free port. Throws UsageError that names the port
// when it is in use. No rank's death harms a store that the launcher hosts. Compatible with c10d's TCPStore, so Python
// ranks can join as well. What strangers send to it is not worth a line: c10d's log level is raised in this process.
class StoreServer {
 public:
  StoreServer(const std::string& address, int port, const JobIdentity& job = {});
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  int port() const;
  // Tells the ranks why a peer is gone, in a sentence ("rank 1 was killed by signal 9 (SIGKILL)"). The first report
  // counts. Never throws.
  void report_failure(const std::string& text);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace shoal
