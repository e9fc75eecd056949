#include "comm/store/given_store.h"

#include <fmt/format.h>

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/store/authenticated_store.h"

namespace shoal {

c10::intrusive_ptr<c10d::Store> innermost(const c10::intrusive_ptr<c10d::Store>& store) {
  auto* prefix = dynamic_cast<c10d::PrefixStore*>(store.get());
  return prefix == nullptr ? store : prefix->getUnderlyingNonPrefixStore();
}

std::optional<ServerAddress> server_of(const c10::intrusive_ptr<c10d::Store>& store) {
  const auto inner = innermost(store);
  const auto* tcp = dynamic_cast<const c10d::TCPStore*>(inner.get());
  if (tcp == nullptr) return std::nullopt;
  return ServerAddress{tcp->getHost(), tcp->getPort()};
}

std::string describe_store(const c10::intrusive_ptr<c10d::Store>& store) {
  if (const auto server = server_of(store)) return fmt::format("{}:{}", server->host, server->port);
  const auto inner = innermost(store);
  const auto* file = dynamic_cast<const c10d::FileStore*>(inner.get());
  return file == nullptr ? "the given store" : "the file " + file->getPath();
}

namespace {

// On a connection of its own, if the store can have several. TCPStore's clone() waits without an end for a server that
// is stopped, so a thread waits in its place.
c10::intrusive_ptr<c10d::Store> connect_again(const c10::intrusive_ptr<c10d::Store>& store,
                                              std::chrono::milliseconds limit) {
  // A FileStore removes its file once as many stores have ended as there are ranks. Clones count too: the file would go
  // while others still use it, and what they make of a new one can be an endless read.
  if (dynamic_cast<const c10d::FileStore*>(innermost(store).get()) != nullptr) return store;
  auto own = within(limit, [store] {
    try {
      return store->clone();
    } catch (const std::exception&) {
      return store;  // this kind of store has no clones
    }
  });
  if (!own) throw no_answer(describe_store(store), limit);
  return *std::move(own);
}

}  // namespace

StorePtr guard_store(const c10::intrusive_ptr<c10d::Store>& store, int timeout_seconds, const JobIdentity& job) {
  const std::chrono::seconds limit(timeout_seconds);
  return c10::make_intrusive<DeadlineStore>(authenticated(connect_again(store, limit), job), describe_store(store),
                                            limit);
}

}  // namespace shoal
