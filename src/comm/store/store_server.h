#pragma once
// Server of the key-value store through which the ranks of a job find each other.

#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include "comm/rendezvous/job_identity.h"
#include "comm/rendezvous/socket.h"

namespace shoal {

// Place of a store that is not served yet: whoever connects waits. Listens on `address` alone (a numeric address or a
// name of one of this host's interfaces); on all interfaces if it is the name of several that are not all loopback, as
// others may reach one or another. port 0 takes any free port. UsageError names a port that is in use, or an address
// that this host does not reach itself.
class StorePlace {
 public:
  // limit: how long a name that is not known yet is asked for.
  StorePlace(std::string address, int port, std::chrono::seconds limit = {});

  const std::string& address() const { return address_; }
  int port() const { return port_; }
  // Numeric address at which this process reaches it.
  std::string own_number() const;
  // The listening socket, once.
  Descriptor take() { return std::move(listening_); }

 private:
  std::string address_;
  Descriptor listening_;
  int port_;
};

// Numeric address of the host, of several the first at which somebody listens. UsageError if the name is not
// known within the limit.
std::string reached_address(const std::string& host, int port, std::chrono::seconds limit = {});

// Serves the store at its place from construction to destruction, and publishes the job's name in it. Has threads from
// then on: a process that forks ranks does so before. A store that the launcher hosts survives the death of any rank.
// Compatible with c10d's TCPStore, so that Python ranks can join. Raises c10d's log level in this process, because
// messages from strangers are not worth logging.
class StoreServer {
 public:
  explicit StoreServer(StorePlace place, const JobIdentity& job = {});
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  int port() const;
  // Publishes why a peer is gone, as a sentence ("rank 1 was killed by signal 9 (SIGKILL)"). The first report counts.
  // Never throws.
  void report_failure(const std::string& text);
  // That the process of a rank has ended, for those that wait for it to come. Never throws.
  void report_end(const std::string& generation, int rank);
  // Why an elastic job is lost, as a rank says; empty: none does. Never throws.
  std::string lost(const std::string& generation) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace shoal
