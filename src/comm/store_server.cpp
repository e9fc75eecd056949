#include "comm/store_server.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/store.h"
#include "shoal/base/error.h"

namespace shoal {
namespace {

struct Endpoint {
  sockaddr_storage address{};
  socklen_t length = 0;
};

Endpoint resolve(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0) {
    throw UsageError(
        fmt::format("cannot resolve the address '{}': {}; give MASTER_ADDR a name or number of rank 0's host", host,
                    gai_strerror(error)));
  }
  Endpoint endpoint;
  std::memcpy(&endpoint.address, found->ai_addr, found->ai_addrlen);
  endpoint.length = found->ai_addrlen;
  freeaddrinfo(found);
  return endpoint;
}

// A socket bound to one interface only; c10d's own store would listen on all of them.
int listen_on(const std::string& host, int port) {
  const auto endpoint = resolve(host, port);
  const int fd = socket(endpoint.address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int yes = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  if (bind(fd, reinterpret_cast<const sockaddr*>(&endpoint.address), endpoint.length) != 0 || listen(fd, 1024) != 0) {
    const int error = errno;
    close(fd);
    if (error == EADDRINUSE) {
      throw UsageError(fmt::format("port {} of {} is in use; choose another one (MASTER_PORT, --port)", port, host));
    }
    throw UsageError(fmt::format("cannot listen on {}:{}: {}; the address must be one of this host's", host, port,
                                 std::strerror(error)));
  }
  return fd;
}

int port_of(int fd) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length);
  const auto* v4 = reinterpret_cast<const sockaddr_in*>(&address);
  const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&address);
  return ntohs(address.ss_family == AF_INET6 ? v6->sin6_port : v4->sin_port);
}

bool somebody_listens(const std::string& host, int port) {
  const auto endpoint = resolve(host, port);
  const int fd = socket(endpoint.address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const bool connected = connect(fd, reinterpret_cast<const sockaddr*>(&endpoint.address), endpoint.length) == 0;
  close(fd);
  return connected;
}

}  // namespace

std::optional<std::string> store_try_get(c10d::Store& store, const std::string& key) {
  if (!store.check({key})) return std::nullopt;
  const auto bytes = store.get(key);
  return std::string(bytes.begin(), bytes.end());
}

void store_set(c10d::Store& store, const std::string& key, const std::string& value) {
  store.set(key, std::vector<uint8_t>(value.begin(), value.end()));
}

std::string store_set_once(c10d::Store& store, const std::string& key, const std::string& value) {
  const auto now = store.compareSet(key, {}, std::vector<uint8_t>(value.begin(), value.end()));
  return {now.begin(), now.end()};
}

StorePtr connect_store(const std::string& address, int port, int timeout_seconds) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(timeout_seconds);
  while (!somebody_listens(address, port)) {
    if (std::chrono::steady_clock::now() > deadline) {
      throw CommError(
          fmt::format("nothing listens at {}:{} after {} s: rank 0 did not start, or MASTER_ADDR and "
                      "MASTER_PORT differ between ranks",
                      address, port, timeout_seconds));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  try {
    const auto store = within(std::chrono::seconds(5), [address, port]() -> StorePtr {
      c10d::TCPStoreOptions options;
      options.port = static_cast<uint16_t>(port);
      options.waitWorkers = false;
      return c10::make_intrusive<c10d::TCPStore>(address, options);
    });
    if (store) return *store;
  } catch (const c10::Error&) {  // NOLINT(bugprone-empty-catch): refused the handshake; as bad as no answer
  }
  throw CommError(
      fmt::format("what listens at {}:{} is not the job's store; is the port in use by another program? "
                  "Choose another MASTER_PORT",
                  address, port));
}

struct StoreServer::State {
  c10::intrusive_ptr<c10d::TCPStore> store;
};

StoreServer::StoreServer(const std::string& address, int port) : state_(std::make_unique<State>()) {
  const int fd = listen_on(address, port);
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(port_of(fd));
  options.isServer = true;
  options.waitWorkers = false;
  options.masterListenFd = fd;
  state_->store = c10::make_intrusive<c10d::TCPStore>(address, options);
}

StoreServer::~StoreServer() = default;

int StoreServer::port() const {
  return state_->store->getPort();
}

void StoreServer::report_failure(const std::string& text) {
  try {
    store_set_once(*state_->store, first_failure_key("0"), text);
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the report only improves other ranks' messages
  }
}

}  // namespace shoal
