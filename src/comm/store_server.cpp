#include "comm/store_server.h"

#include <fmt/format.h>

#include <system_error>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/socket.h"
#include "comm/store.h"
#include "shoal/base/error.h"

namespace shoal {
namespace {

SocketAddress resolve_master(const std::string& host, int port) {
  try {
    return resolve(host, port);
  } catch (const std::runtime_error& error) {
    throw UsageError(fmt::format(
        "cannot resolve the address '{}': {}; give MASTER_ADDR a name or number of rank 0's host", host, error.what()));
  }
}

// c10d's own store would listen on all interfaces.
Descriptor listen_for_ranks(const std::string& host, int port) {
  try {
    return listen_on(resolve_master(host, port));
  } catch (const std::system_error& error) {
    if (error.code() == std::errc::address_in_use) {
      throw UsageError(fmt::format("port {} of {} is in use; choose another one (MASTER_PORT, --port)", port, host));
    }
    throw UsageError(fmt::format("cannot listen on {}:{}: {}; the address must be one of this host's", host, port,
                                 error.code().message()));
  }
}

bool somebody_listens(const std::string& host, int port) {
  const auto address = resolve_master(host, port);
  return connect_to(make_socket(address, SOCK_STREAM), address);
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
  auto listening = listen_for_ranks(address, port);
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(own_address(listening).port());
  options.isServer = true;
  options.waitWorkers = false;
  options.masterListenFd = listening.release();
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
