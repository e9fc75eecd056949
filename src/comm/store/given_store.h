#pragma once
// Stores of c10d that a program has connected itself, such as torch.distributed's. Only for files of comm/.

#include <optional>
#include <string>

#include "comm/store/store.h"

namespace shoal {

// The store of which this one is the part whose keys have a prefix; else this one.
c10::intrusive_ptr<c10d::Store> innermost(const c10::intrusive_ptr<c10d::Store>& store);

// Location of a store, for messages: "node3:29500", "the file /tmp/store".
std::string describe_store(const c10::intrusive_ptr<c10d::Store>& store);

// Host and port of its server, if it has one.
struct ServerAddress {
  std::string host;
  int port;
};
std::optional<ServerAddress> server_of(const c10::intrusive_ptr<c10d::Store>& store);

// The same store on a connection of its own, where the store can have several, so that a program that waits for a key
// does not delay shoal. StoreUnreachable if its server does not answer within the time.
StorePtr guard_store(const c10::intrusive_ptr<c10d::Store>& store, int timeout_seconds, const JobIdentity& job);

}  // namespace shoal
