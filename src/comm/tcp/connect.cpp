#include "comm/tcp/connect.h"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <list>
#include <optional>
#include <stdexcept>

#include "comm/rendezvous/handshake.h"
#include "comm/rendezvous/peer_socket.h"
#include "comm/rendezvous/world_state.h"
#include "comm/store/authenticated_store.h"
#include "comm/store/store_gather.h"
#include "shoal/detail/clock.h"
#include "shoal/error.h"

namespace shoal::tcp {
namespace {

// First on a connection, from the caller.
struct Hello {
  static constexpr uint32_t expected_magic = 0x53485448;
  uint32_t magic = expected_magic;
  uint32_t rank = 0;
  uint64_t key = 0;  // of the group's place that is called
};

uint64_t random_key() {
  const auto bytes = random_challenge();
  uint64_t key = 0;
  std::memcpy(&key, bytes.data(), sizeof key);
  return key;
}

// Connection to a rank that this one calls. Calls again if the other end closes before the hello is sent: where
// strangers call all the time, a rank that has too many visitors ends the oldest.
class CallTo {
 public:
  CallTo(std::string place, uint64_t key, int own_rank)
      : place_(std::move(place)), hello_{.rank = static_cast<uint32_t>(own_rank), .key = key} {}

  // Whether the hello is sent. std::runtime_error if the rank cannot be reached.
  bool advance(const JobIdentity& job) {
    if (Clock::now() < next_call_) return false;
    if (!socket_.open()) {
      socket_ = connect_to(place_);
      handshake_.emplace(job, Handshake::Side::caller, hello_.key);
      sent_ = 0;
    }
    const auto state = handshake_->advance(socket_);
    if (state == Handshake::State::under_way) return false;
    if (state == Handshake::State::done) {
      const auto left = sizeof hello_ - sent_;
      const auto sent = send(socket_.number(), reinterpret_cast<const char*>(&hello_) + sent_, left, MSG_NOSIGNAL);
      if (sent == static_cast<ssize_t>(left)) return true;
      if (sent >= 0) sent_ += static_cast<size_t>(sent);
      if (sent >= 0 || came_too_early()) return false;
    }
    constexpr std::chrono::seconds time_to_be_heard(15);
    if (Clock::now() - first_call_ > time_to_be_heard) throw std::runtime_error(place_ + " does not answer");
    socket_ = Descriptor();
    next_call_ = Clock::now() + std::chrono::milliseconds(20);
    return false;
  }

  pollfd awaits() const {
    return {socket_.number(), static_cast<short>(handshake_ && handshake_->listens() ? POLLIN : POLLOUT), 0};
  }
  Descriptor take() { return std::move(socket_); }

 private:
  std::string place_;
  Hello hello_;
  Descriptor socket_;
  std::optional<Handshake> handshake_;
  size_t sent_ = 0;  // of the hello
  Clock::time_point first_call_ = Clock::now();
  Clock::time_point next_call_{};
};

// Connection from a rank, or from a stranger.
class CallFrom {
 public:
  CallFrom(Descriptor socket, const JobIdentity& job, uint64_t key)
      : socket_(std::move(socket)), handshake_(job, Handshake::Side::called, key) {}

  // The caller's hello, once it is here.
  std::optional<Hello> advance() {
    const auto state = handshake_.advance(socket_);
    if (state == Handshake::State::under_way) return std::nullopt;
    ended_ = state != Handshake::State::done;
    if (ended_) return std::nullopt;
    const auto left = sizeof hello_ - got_;
    const auto got = recv(socket_.number(), reinterpret_cast<char*>(&hello_) + got_, left, 0);
    if (got <= 0) {
      ended_ = got == 0 || !came_too_early();
      return std::nullopt;
    }
    got_ += static_cast<size_t>(got);
    return got_ == sizeof hello_ ? std::optional(hello_) : std::nullopt;
  }

  bool over() const {
    constexpr std::chrono::seconds time_to_greet(10);
    return ended_ || Clock::now() - came_ > time_to_greet;
  }
  pollfd awaits() const { return {socket_.number(), POLLIN, 0}; }
  Descriptor take() { return std::move(socket_); }

 private:
  Descriptor socket_;
  Handshake handshake_;
  Hello hello_;
  size_t got_ = 0;
  bool ended_ = false;
  Clock::time_point came_ = Clock::now();
};

// Each rank calls those before it.
class Connecting {
 public:
  Connecting(const WorldState& world, const std::string& group, int rank, const std::vector<int>& world_ranks,
             std::chrono::milliseconds limit)
      : world_(world),
        group_(group),
        rank_(rank),
        world_ranks_(world_ranks),
        limit_(limit),
        links_(world_ranks.size()) {}

  std::vector<std::unique_ptr<Link>> run() {
    const auto address = world_.listen_address.empty() ? "127.0.0.1" : world_.listen_address;
    std::string line;
    try {
      listening_ = listen_for_peers(address);
      line = fmt::format("{} {}", place_of(listening_), key_);
    } catch (const std::exception& error) {
      line = fmt::format("- {}", error.what());
    }
    const auto topic = "tcp/" + group_;
    const auto lines = store_gather(world_, topic, world_ranks_, rank_, line, limit_);
    calls_.resize(rank_);
    places_ = lines;
    for (int other = 0; other < static_cast<int>(lines.size()); ++other) {
      const auto& place = lines[other];
      if (place[0] == '-') throw CommError(failure(other, "cannot listen: " + place.substr(2)), other);
      if (other >= rank_) continue;
      const auto blank = place.find(' ');
      const auto key = number_in<uint64_t>(place.substr(blank + 1), gathered_key(world_, topic, other));
      calls_[other].emplace(place.substr(0, blank), key, rank_);
    }
    const auto deadline = Clock::now() + limit_;
    auto next_look = Clock::now();
    while (!advance()) {
      if (Clock::now() > next_look) {
        look_at_peers(deadline);
        next_look = Clock::now() + std::chrono::milliseconds(100);
      }
      wait();
    }
    return std::move(links_);
  }

 private:
  std::string failure(int rank, const std::string& why) const {
    return fmt::format("cannot connect the ranks of group '{}' over tcp: rank {} {}{}", group_, world_ranks_[rank], why,
                       unreachable_place(rank));
  }

  // Many systems give a host's own name a loopback address in /etc/hosts.
  std::string unreachable_place(int other) const {
    const auto& peers = world_.meeting.peers;
    if (peers[world_ranks_[other]].host == peers[world_ranks_[rank_]].host) return "";
    for (const int one : {rank_, other}) {
      const auto place = static_cast<size_t>(one) < places_.size() ? places_[one] : "";
      const auto address = place.substr(0, place.find(' '));
      if (!address.starts_with("127.") && !address.starts_with("::1:")) continue;
      return fmt::format(
          "; rank {} listens at {}, which other hosts do not reach: set MASTER_ADDR to a number, or to a name that is "
          "not a loopback address on any host",
          world_ranks_[one], address);
    }
    return "";
  }

  bool advance() {
    for (int other = 0; other < rank_; ++other) {
      auto& call = calls_[other];
      if (!call) continue;
      try {
        if (!call->advance(world_.placement.job)) continue;
      } catch (const std::exception& error) {
        throw CommError(failure(other, fmt::format("cannot be reached: {}", error.what())), other);
      }
      links_[other] = std::make_unique<Link>(call->take(), other);
      call.reset();
    }
    admit();
    for (auto visitor = visitors_.begin(); visitor != visitors_.end();) {
      const auto hello = visitor->advance();
      if (hello && is_expected(*hello)) {
        links_[hello->rank] = std::make_unique<Link>(visitor->take(), static_cast<int>(hello->rank));
      }
      visitor = hello || visitor->over() ? visitors_.erase(visitor) : std::next(visitor);
    }
    return std::count(links_.begin(), links_.end(), nullptr) == 1;
  }

  bool is_expected(const Hello& hello) const {
    return hello.magic == Hello::expected_magic && hello.key == key_ && hello.rank < links_.size() &&
           static_cast<int>(hello.rank) > rank_ && !links_[hello.rank];
  }

  void admit() {
    constexpr size_t most_visitors = 256;
    while (true) {
      Descriptor accepted(accept4(listening_.number(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!accepted.open()) return;
      prepare(accepted);
      visitors_.emplace_back(std::move(accepted), world_.placement.job, key_);
      if (visitors_.size() > most_visitors + links_.size()) visitors_.pop_front();
    }
  }

  void look_at_peers(Clock::time_point deadline) const {
    if (world_.watch && world_.watch->raised()) throw CommError(world_.watch->why());
    if (const auto fault = world_.liveness->check(world_ranks_)) throw CommError(fault->text);
    if (world_.options.while_waiting) world_.options.while_waiting();
    if (Clock::now() < deadline) return;
    for (int other = 0; other < static_cast<int>(links_.size()); ++other) {
      if (other == rank_ || links_[other]) continue;
      throw CommError(
          failure(other, fmt::format("has not connected within {} s", std::chrono::duration<double>(limit_).count())),
          other);
    }
  }

  void wait() const {
    std::vector<pollfd> polled{{listening_.number(), POLLIN, 0}};
    for (const auto& call : calls_) {
      if (call) polled.push_back(call->awaits());
    }
    for (const auto& visitor : visitors_) polled.push_back(visitor.awaits());
    poll(polled.data(), polled.size(), 20);
  }

  const WorldState& world_;
  const std::string& group_;
  const int rank_;
  const std::vector<int>& world_ranks_;
  const std::chrono::milliseconds limit_;
  const uint64_t key_ = random_key();
  Descriptor listening_;
  std::vector<std::string> places_;           // by rank, with its key
  std::vector<std::optional<CallTo>> calls_;  // by rank
  std::list<CallFrom> visitors_;
  std::vector<std::unique_ptr<Link>> links_;
};

}  // namespace

std::vector<std::unique_ptr<Link>> connect_ranks(const WorldState& world, const std::string& group, int rank,
                                                 const std::vector<int>& world_ranks, std::chrono::milliseconds limit) {
  return Connecting(world, group, rank, world_ranks, limit).run();
}

}  // namespace shoal::tcp
