#include "comm/store/store_server.h"

#include <c10/util/Logging.h>
#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <system_error>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "base/without_sigpipe.h"
#include "comm/rendezvous/socket.h"
#include "comm/store/authenticated_store.h"
#include "comm/store/idle_connection_reaper.h"
#include "comm/store/store.h"
#include "shoal/detail/clock.h"
#include "shoal/error.h"

namespace shoal {
namespace {

std::vector<SocketAddress> resolve_master(const std::string& host, int port, std::chrono::seconds limit = {}) {
  try {
    return resolve_within(limit, host, port);
  } catch (const std::runtime_error& error) {
    throw UsageError(fmt::format(
        "cannot resolve the address '{}': {}; give MASTER_ADDR a name or number of rank 0's host", host, error.what()));
  }
}

// Bounded by the deadline, because packets to a missing host may be dropped silently.
bool somebody_listens(const SocketAddress& address, Clock::time_point deadline) {
  const auto socket = make_socket(address, SOCK_STREAM | SOCK_NONBLOCK);
  if (connect_to(socket, address)) return true;
  if (errno != EINPROGRESS) return false;
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
  pollfd wait{socket.number(), POLLOUT, 0};
  if (poll(&wait, 1, static_cast<int>(std::max<int64_t>(0, left.count()))) != 1) return false;
  int error = 0;
  socklen_t size = sizeof error;
  return getsockopt(socket.number(), SOL_SOCKET, SO_ERROR, &error, &size) == 0 && error == 0;
}

// One of several addresses that drops packets must not take all of the time.
std::optional<SocketAddress> first_that_listens(const std::vector<SocketAddress>& addresses,
                                                Clock::time_point deadline) {
  constexpr std::chrono::seconds patience(2);
  const bool only = addresses.size() == 1;
  for (const auto& address : addresses) {
    try {
      if (somebody_listens(address, only ? deadline : std::min(deadline, Clock::now() + patience))) return address;
    } catch (const std::system_error&) {
      if (only) throw;  // of several, one may be of a family that this host does not have
    }
  }
  return std::nullopt;
}

// c10d's server calls itself, for five minutes if nobody answers.
void require_reachable(const Descriptor& listening, const std::string& host) {
  constexpr std::chrono::seconds patience(3);
  const auto address = own_address(listening);
  if (somebody_listens(address, Clock::now() + patience)) return;
  throw UsageError(
      fmt::format("this host does not reach its own address {}:{}; if that is the loopback interface, bring it up: ip "
                  "link set lo up",
                  host, address.port()));
}

// On the one of these addresses that is this host's. Of several that are, others may reach any one.
Descriptor listen_on_own(const std::vector<SocketAddress>& addresses, int port) {
  std::vector<Descriptor> listening;
  std::optional<std::system_error> refused;
  bool beyond_host = false;
  bool by_ipv6 = false;
  for (const auto& address : addresses) {
    try {
      listening.push_back(listen_on(address));
      beyond_host |= !is_loopback(address.host());
      by_ipv6 |= address.storage.ss_family == AF_INET6;
    } catch (const std::system_error& error) {
      if (addresses.size() == 1 || error.code() == std::errc::address_in_use) throw;
      refused = error;  // another host's, or of a family that this host does not have
    }
  }
  if (listening.empty()) throw std::system_error(*refused);
  if (listening.size() == 1 || !beyond_host) return std::move(listening.front());
  listening.clear();
  return listen_on(resolve(by_ipv6 ? "::" : "0.0.0.0", port));
}

// c10d's own server would always listen on all interfaces.
Descriptor listen_for_ranks(const std::string& host, int port, std::chrono::seconds limit) {
  const auto addresses = resolve_master(host, port, limit);
  try {
    auto listening = listen_on_own(addresses, port);
    require_reachable(listening, host);
    return listening;
  } catch (const std::system_error& error) {
    if (error.code() == std::errc::address_in_use) {
      throw UsageError(fmt::format("port {} of {} is in use; choose another one (MASTER_PORT, --port)", port, host));
    }
    throw UsageError(fmt::format("cannot listen on {}:{}: {}; the address must be one of this host's", host, port,
                                 error.code().message()));
  }
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
  try {
    return store_replace(store, key, "", value);
  } catch (const ForgedValue&) {
    store_set(store, key, value);
    return value;
  }
}

std::string store_replace(c10d::Store& store, const std::string& key, const std::string& before,
                          const std::string& value) {
  const auto now = store.compareSet(key, std::vector<uint8_t>(before.begin(), before.end()),
                                    std::vector<uint8_t>(value.begin(), value.end()));
  return {now.begin(), now.end()};
}

std::string job_claim(const JobIdentity& job) {
  return fmt::format("job {}{}", job.name(), job.has_secret() ? claims_secret : "");
}

StorePtr connect_store(const std::string& address, int port, int timeout_seconds, const JobIdentity& job) {
  const std::chrono::seconds limit(timeout_seconds);
  const auto deadline = Clock::now() + limit;
  // The name of a host that has just started may not be known yet, as that of rank 0's pod.
  resolve_master(address, port, limit);
  std::optional<SocketAddress> server;
  const auto listens = [&] {
    try {
      server = first_that_listens(resolve_master(address, port), deadline);
      return server.has_value();
    } catch (const UsageError&) {  // it is not known for a moment
      std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(limit, std::chrono::milliseconds(300)));
      return false;
    }
  };
  while (!listens()) {
    if (Clock::now() > deadline) {
      throw CommError(
          fmt::format("no server at {}:{} after {} s: rank 0 did not start, its host is unreachable, or MASTER_ADDR "
                      "and MASTER_PORT differ between ranks",
                      address, port, timeout_seconds));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  const auto left = std::max(std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()),
                             std::chrono::milliseconds(1000));
  std::optional<c10::intrusive_ptr<c10d::Store>> store;
  try {
    // c10d takes a wrong answer for a bad connection and retries until its time-out, logging at length, which takes
    // time on a busy machine; without an answer it waits forever.
    const auto number = server->host();
    store = within(left + std::chrono::seconds(1), [number, port, left]() -> c10::intrusive_ptr<c10d::Store> {
      c10d::TCPStoreOptions options;
      options.port = static_cast<uint16_t>(port);
      options.waitWorkers = false;
      options.timeout = left / 2;
      return c10::make_intrusive<c10d::TCPStore>(number, options);
    });
  } catch (const c10::Error&) {
    throw CommError(
        fmt::format("the server at {}:{} is not the job's store; the port may be in use by another program: choose "
                    "another MASTER_PORT",
                    address, port));
  }
  if (!store) {
    throw CommError(
        fmt::format("the server at {}:{} did not answer within {} s: the process with the job's store (rank 0 or the "
                    "launcher) is stopped, or the port is in use by another program",
                    address, port, timeout_seconds));
  }
  return c10::make_intrusive<DeadlineStore>(authenticated(std::move(*store), job), fmt::format("{}:{}", address, port),
                                            limit);
}

std::string reached_address(const std::string& host, int port, std::chrono::seconds limit) {
  const auto addresses = resolve_master(host, port, limit);
  const auto found = addresses.size() > 1 ? first_that_listens(addresses, Clock::time_point::max()) : std::nullopt;
  return found.value_or(addresses.front()).host();
}

void quiet_c10d() {
  constexpr int errors_only = 2;
  FLAGS_caffe2_log_level = std::max(FLAGS_caffe2_log_level, errors_only);
}

struct StoreServer::State {
  std::optional<IdleConnectionReaper> reaper;
  c10::intrusive_ptr<c10d::TCPStore> server;
  c10::intrusive_ptr<c10d::Store> store;  // as the job's processes see it
};

StorePlace::StorePlace(std::string address, int port, std::chrono::seconds limit)
    : address_(std::move(address)),
      listening_(listen_for_ranks(address_, port, limit)),
      port_(own_address(listening_).port()) {}

std::string StorePlace::own_number() const {
  const auto number = own_address(listening_).host();
  return number == "0.0.0.0" || number == "::" ? "127.0.0.1" : number;
}

StoreServer::StoreServer(StorePlace place, const JobIdentity& job) : state_(std::make_unique<State>()) {
  quiet_c10d();
  const WithoutSigpipe guard;  // for the server's thread: libuv writes to clients that have ended
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(place.port());
  options.isServer = true;
  options.waitWorkers = false;
  const auto number = place.own_number();  // the server calls itself
  options.masterListenFd = place.take().release();
  state_->server = c10::make_intrusive<c10d::TCPStore>(number, options);
  state_->reaper.emplace(this->port());
  state_->store = authenticated(state_->server, job);
  store_set(*state_->store, claim_key, job_claim(job));
}

StoreServer::~StoreServer() = default;

int StoreServer::port() const {
  return state_->server->getPort();
}

void StoreServer::report_failure(const std::string& text) {
  try {
    store_set_once(*state_->store, first_failure_key("0"), text);
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the report only improves other ranks' messages
  }
}

void StoreServer::report_end(const std::string& generation, int rank) {
  try {
    store_set(*state_->store, ended_key(generation, rank), "ended");
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the report only makes others wait less
  }
}

std::string StoreServer::lost(const std::string& generation) const {
  try {
    return store_try_get(*state_->store, lost_key(generation)).value_or("");
  } catch (const std::exception&) {  // of somebody who has no secret
    return "";
  }
}

}  // namespace shoal
