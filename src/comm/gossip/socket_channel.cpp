#include "comm/gossip/socket_channel.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <torch/types.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <random>
#include <thread>

#include "comm/gossip/connection.h"
#include "comm/group/group_state.h"
#include "comm/rendezvous/world_state.h"
#include "comm/store/store_gather.h"
#include "shoal/error.h"
#include "shoal/telemetry.h"

namespace shoal {
namespace {

using SteadyClock = std::chrono::steady_clock;

// Place where a rank listens, and the key that its visitors must know: "PLACE KEY".
struct Address {
  std::string place;
  uint64_t key = 0;
};

Address address_of(const std::string& line) {
  const auto blank = line.find(' ');
  return {line.substr(0, blank), std::stoull(line.substr(blank + 1))};
}

// Channel whose own thread moves all bytes; the rank's thread only reads what has arrived and queues what is to be
// sent.
class SocketChannel : public GossipChannel {
 public:
  SocketChannel(const GroupState& group, std::vector<GossipBuffer> buffers, Descriptor listening,
                std::vector<Address> addresses)
      : rank_(group.rank),
        group_(group.name),
        timeline_(group.world->options.timeline),
        job_(group.world->placement.job),
        memory_(group.world->memory),
        buffers_(std::move(buffers)),
        addresses_(std::move(addresses)),
        peers_(addresses_.size()),
        drafts_(buffers_.size()),
        shown_(buffers_.size()),
        listening_(std::move(listening)),
        wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    for (size_t other = 0; other < peers_.size(); ++other) peers_[other].gone = addresses_[other].place.empty();
    thread_ = std::thread([this] { run(); });
  }

  ~SocketChannel() override {
    leave();
    {
      // Sends what neighbours still wait for, bounded by a limit for neighbours that receive nothing.
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, std::chrono::seconds(2), [this] {
        return std::all_of(peers_.begin(), peers_.end(),
                           [](const Peer& peer) { return peer.gone || peer.outgoing.idle(); });
      });
      ending_ = true;
    }
    wake();
    thread_.join();
  }

  at::Tensor draft(size_t buffer, Limit limit) override {
    std::unique_lock lock(mutex_);
    const auto deadline = SteadyClock::now() + limit;
    auto& shown = shown_[buffer];
    while (shown.size() >= versions_ahead) {
      for (const int reader : shown.front().readers) {
        auto& peer = peers_[reader];
        const auto taken = [&] { return peer.gone || peer.taken[buffer] >= shown.front().version; };
        if (!peer.takes_late) wait(lock, deadline, [&] { return taken() || stops(peer); });
        peer.takes_late = !taken();
      }
      shown.pop_front();
    }
    return drafts_[buffer] = memory(buffer);
  }

  void publish(size_t buffer, int64_t version, const std::vector<int>& readers) override {
    {
      const std::lock_guard lock(mutex_);
      shown_[buffer].push_back({version, readers});
      newest_ = version;
      for (const int reader : readers) {
        // A reader that does not keep up misses this version, which bounds its queue.
        const auto& peer = peers_[reader];
        if (peer.gone || (peer.takes_late && !peer.outgoing.idle())) continue;
        const auto bytes = static_cast<uint64_t>(drafts_[buffer].nbytes());
        put(reader,
            {.kind = FrameKind::values, .buffer = static_cast<uint32_t>(buffer), .version = version, .bytes = bytes},
            drafts_[buffer]);
      }
      drafts_[buffer] = at::Tensor();
    }
    wake();
  }

  Reading read(size_t buffer, int64_t version, int source, Limit limit, const Use& use) override {
    const auto result = take(buffer, version, source, limit, use);
    {
      const std::lock_guard lock(mutex_);
      if (!peers_[source].gone) {
        put(source, {.kind = FrameKind::taken, .buffer = static_cast<uint32_t>(buffer), .version = version});
      }
    }
    wake();
    return result;
  }

  bool gone(int rank, int64_t version) override {
    const std::lock_guard lock(mutex_);
    const auto& peer = peers_[rank];
    if (!peer.gone || peer.last_version >= version) return false;
    // One that was killed has announced nothing, but all of its values may have come.
    for (size_t buffer = 0; buffer < buffers_.size(); ++buffer) {
      const auto shown = peer.shown.find(buffer);
      if (shown == peer.shown.end() || shown->second.lower_bound(version) == shown->second.end()) return true;
    }
    return buffers_.empty();
  }

  void forget() override {
    const std::lock_guard lock(mutex_);
    for (auto& shown : shown_) shown.clear();
  }

  void stop(int64_t version, uint32_t reason) override {
    {
      const std::lock_guard lock(mutex_);
      tell_all({.kind = FrameKind::stop, .buffer = reason, .version = version});
    }
    wake();
  }

  std::optional<Stop> stopped(int rank) override {
    const std::lock_guard lock(mutex_);
    return stops(peers_[rank]) ? peers_[rank].stop : std::nullopt;
  }

  void start_afresh(int64_t version) override {
    const std::lock_guard lock(mutex_);
    for (auto& shown : shown_) shown.clear();
    begun_ = version;
    for (auto& peer : peers_) peer.late = peer.takes_late = false;
  }

  void leave() override {
    {
      const std::lock_guard lock(mutex_);
      if (std::exchange(left_, true)) return;
      tell_all({.kind = FrameKind::bye, .version = newest_});
    }
    wake();
  }

  std::string address() const override {
    const auto& own = addresses_[rank_];
    return fmt::format("{} {}", own.place, own.key);
  }

  void admit(int rank, const std::string& address) override {
    const std::lock_guard lock(mutex_);
    addresses_[rank] = address_of(address);
    peers_[rank] = Peer();
    // Data from the previous process, and its end, no longer matter.
    std::erase_if(visitors_, [&](const Visitor& visitor) { return visitor.rank == rank; });
  }

 private:
  struct Peer {
    OutgoingConnection outgoing;
    bool greeted = false;
    bool gone = false;
    int64_t last_version = 0;                               // valid if the rank has announced that it leaves
    std::optional<Stop> stop;                               // set if the rank has stopped
    bool late = false;                                      // the last wait for it as a source timed out
    bool takes_late = false;                                // the last wait for it as a reader timed out
    std::map<size_t, std::map<int64_t, at::Tensor>> shown;  // by buffer and version
    std::map<size_t, int64_t> taken;  // by buffer: newest version of ours that it has finished with
  };

  Reading take(size_t buffer, int64_t version, int source, Limit limit, const Use& use) {
    if (used_.buffer != buffer || used_.version != version) used_ = {.buffer = buffer, .version = version};
    if (const auto again = used_.values.find(source); again != used_.values.end()) {
      use(again->second.second);
      return {.arrival = Arrival::here, .version = again->second.first};
    }
    std::unique_lock lock(mutex_);
    auto& peer = peers_[source];
    auto& shown = peer.shown[buffer];
    const auto found = [&] { return shown.lower_bound(version) != shown.end(); };
    if (!found() && !peer.late) {
      wait(lock, SteadyClock::now() + limit, [&] { return found() || peer.gone || stops(peer); });
    }
    peer.late = !found();
    if (shown.empty()) return {.arrival = peer.gone ? Arrival::gone : Arrival::late};
    const auto [number, values] = found() ? *shown.lower_bound(version) : *std::prev(shown.end());
    // A newer version stays: it is read next, or this rank would find too new a version in every following step.
    shown.erase(shown.begin(), shown.upper_bound(version));
    lock.unlock();
    use(values);
    used_.values[source] = {number, values};
    return {.arrival = Arrival::here, .version = number};
  }

  // Ends early once ranks of an elastic job have ended: a neighbour may be waiting for this rank to learn of it.
  void wait(std::unique_lock<std::mutex>& lock, SteadyClock::time_point end, const std::function<bool()>& done) {
    constexpr auto slice = std::chrono::milliseconds(20);
    while (!changed_.wait_until(lock, std::min(end, SteadyClock::now() + slice), done)) {
      if (SteadyClock::now() >= end || (memory_ && memory_->interrupted())) return;
    }
  }

  bool stops(const Peer& peer) const { return peer.stop && peer.stop->version > begun_; }

  void tell_all(const Frame& frame) {
    for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
      if (rank != rank_ && !peers_[rank].gone) put(rank, frame);
    }
  }

  void put(int rank, Frame frame, at::Tensor values = {}) {
    auto& peer = peers_[rank];
    frame.source = static_cast<uint32_t>(rank_);
    frame.key = addresses_[rank].key;
    if (!std::exchange(peer.greeted, true)) peer.outgoing.put({.source = frame.source, .key = frame.key});
    peer.outgoing.put(frame, std::move(values));
  }

  void wake() const {
    const uint64_t one = 1;
    [[maybe_unused]] const auto written = write(wake_.number(), &one, sizeof one);
  }

  // Reuses memory that nobody holds any more.
  at::Tensor memory(size_t buffer) {
    const auto& [numel, dtype] = buffers_[buffer];
    auto& pool = pool_[{numel, dtype}];
    for (auto& tensor : pool) {
      if (tensor.use_count() == 1) return tensor;
    }
    return pool.emplace_back(at::empty({numel}, at::TensorOptions(dtype)));
  }

  // Oldest version being sent. On a slow link, two versions at once would take twice as long each while some rank waits
  // for the older one. Peers that receive nothing do not count.
  int64_t oldest_on_the_way() const {
    auto oldest = std::numeric_limits<int64_t>::max();
    for (const auto& peer : peers_) {
      const auto version = peer.gone || !peer.outgoing.moves() ? std::nullopt : peer.outgoing.version();
      if (version) oldest = std::min(oldest, *version);
    }
    return oldest;
  }

  void run() {
    std::vector<pollfd> polled;
    bool held_back = false;
    while (true) {
      polled.clear();
      {
        const std::lock_guard lock(mutex_);
        if (ending_) return;
        held_back = false;
        for (auto& peer : peers_) {
          if (peer.gone) continue;
          const auto rank = static_cast<int>(&peer - peers_.data());
          const auto version = peer.outgoing.version();
          if (version && *version > oldest_on_the_way()) {
            held_back = true;
            continue;
          }
          const auto& [place, key] = addresses_[rank];
          if (!peer.outgoing.advance(place, job_, key)) lose(rank);
          if (!peer.gone && !peer.outgoing.idle()) {
            polled.push_back({peer.outgoing.socket().number(), peer.outgoing.awaits(), 0});
          }
        }
        for (auto& visitor : visitors_) polled.push_back({visitor.connection.socket().number(), POLLIN, 0});
      }
      changed_.notify_all();
      polled.push_back({listening_.number(), POLLIN, 0});
      polled.push_back({wake_.number(), POLLIN, 0});
      poll(polled.data(), polled.size(), held_back ? 20 : 500);
      uint64_t rung = 0;
      [[maybe_unused]] const auto got = ::read(wake_.number(), &rung, sizeof rung);
      const std::lock_guard lock(mutex_);
      admit();
      for (auto& visitor : visitors_) hear(visitor);
      show_out();
    }
  }

  // Last values read, of one buffer and for one version, by source: the reader may have to start over.
  struct Used {
    size_t buffer = 0;
    int64_t version = 0;
    std::map<int, std::pair<int64_t, at::Tensor>> values{};
  };

  struct Visitor {
    IncomingConnection connection;
    int rank = -1;  // known after its hello
    bool ended = false;
    Clock::time_point came{};
    Clock::time_point begun{};  // start of the frame in progress
  };

  void admit() {
    while (true) {
      Descriptor accepted(accept4(listening_.number(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (!accepted.open()) return;
      prepare(accepted);
      Handshake handshake(job_, Handshake::Side::called, addresses_[rank_].key);
      visitors_.push_back(
          {.connection = IncomingConnection(std::move(accepted), std::move(handshake)), .came = Clock::now()});
    }
  }

  // Ends visitors that have not sent a hello in time and, if there are too many, the oldest of them.
  void show_out() {
    constexpr std::chrono::seconds time_to_greet(10);
    constexpr int64_t most_strangers = 256;
    const auto latest = Clock::now() - time_to_greet;
    // A caller that has shaken hands believes that it is connected: what it sends next must not be lost.
    const auto stranger = [](const Visitor& visitor) { return visitor.rank < 0 && !visitor.connection.proved(); };
    const auto over = [&](const Visitor& visitor) {
      return visitor.ended || (stranger(visitor) && visitor.came < latest);
    };
    std::erase_if(visitors_, over);
    auto surplus = std::count_if(visitors_.begin(), visitors_.end(), stranger) - most_strangers;
    std::erase_if(visitors_, [&](const Visitor& visitor) { return stranger(visitor) && surplus-- > 0; });
  }

  void hear(Visitor& visitor) {
    const auto accept = [&](const Frame& frame) {
      visitor.begun = Clock::now();
      return expected(visitor, frame);
    };
    const auto arrived = [&](const Frame& frame, const at::Tensor& values) {
      auto& peer = peers_[frame.source];
      if (frame.kind == FrameKind::hello) visitor.rank = static_cast<int>(frame.source);
      if (frame.kind == FrameKind::bye) {
        peer.gone = true;
        peer.last_version = frame.version;
      }
      if (frame.kind == FrameKind::lost && frame.buffer < peers_.size() && static_cast<int>(frame.buffer) != rank_ &&
          static_cast<uint64_t>(frame.version) == addresses_[frame.buffer].key) {
        peers_[frame.buffer].gone = true;
      }
      if (frame.kind == FrameKind::stop) peer.stop = Stop{.version = frame.version, .reason = frame.buffer};
      if (frame.kind == FrameKind::taken) peer.taken[frame.buffer] = std::max(peer.taken[frame.buffer], frame.version);
      if (frame.kind != FrameKind::values) return;
      note(visitor, frame);
      auto& shown = peer.shown[frame.buffer];
      shown[frame.version] = values;
      while (shown.size() > versions_ahead) shown.erase(shown.begin());
    };
    visitor.ended = !visitor.connection.advance(accept, arrived);
    if (visitor.ended && visitor.rank >= 0) lose(visitor.rank);
  }

  void note(const Visitor& visitor, const Frame& frame) const {
    if (!timeline_) return;
    timeline_->add(
        {.category = "exchange",
         .name = "values",
         .group = group_,
         .label = {frame.version, static_cast<int64_t>(frame.buffer), fmt::format("of rank {}", frame.source)},
         .bytes = static_cast<int64_t>(frame.bytes),
         .begin = visitor.begun,
         .end = Clock::now()});
  }

  // Tells the others that a rank is gone, because only its neighbours see that.
  void lose(int rank) {
    if (std::exchange(peers_[rank].gone, true) || left_) return;
    tell_all({.kind = FrameKind::lost,
              .buffer = static_cast<uint32_t>(rank),
              .version = static_cast<int64_t>(addresses_[rank].key)});
  }

  std::optional<at::Tensor> expected(const Visitor& visitor, const Frame& frame) {
    const bool first = visitor.rank < 0;
    const bool known = frame.key == addresses_[rank_].key && frame.source < peers_.size() &&
                       first == (frame.kind == FrameKind::hello) &&
                       (first || visitor.rank == static_cast<int>(frame.source));
    if (!known) return std::nullopt;
    const bool names_buffer = frame.kind == FrameKind::values || frame.kind == FrameKind::taken;
    if (names_buffer && frame.buffer >= buffers_.size()) return std::nullopt;
    if (frame.kind != FrameKind::values) return frame.bytes == 0 ? std::optional(at::Tensor()) : std::nullopt;
    if (frame.bytes != bytes_of(frame.buffer)) return std::nullopt;
    return memory(frame.buffer);
  }
  uint64_t bytes_of(size_t buffer) const {
    return static_cast<uint64_t>(buffers_[buffer].numel) * c10::elementSize(buffers_[buffer].dtype);
  }

  static constexpr size_t versions_ahead = 2;  // limit for a rank's lead over its readers

  const int rank_;
  const std::string group_;
  const std::shared_ptr<Timeline> timeline_;
  const JobIdentity job_;
  const std::shared_ptr<HostMemory> memory_;  // knows of ranks that have ended
  const std::vector<GossipBuffer> buffers_;
  std::vector<Address> addresses_;  // empty place: the rank has ended; changed under the mutex
  std::mutex mutex_;                // guards what follows
  std::condition_variable changed_;
  std::vector<Peer> peers_;
  std::vector<Visitor> visitors_;
  std::vector<at::Tensor> drafts_;
  struct Shown {
    int64_t version;
    std::vector<int> readers;
  };
  Used used_;                             // used by the rank's own thread
  std::vector<std::deque<Shown>> shown_;  // last versions, by buffer
  std::map<std::pair<int64_t, at::ScalarType>, std::vector<at::Tensor>> pool_;
  int64_t newest_ = 0;  // newest version shown
  int64_t begun_ = -1;  // stops up to this version have ended
  bool left_ = false;
  bool ending_ = false;
  const Descriptor listening_;
  const Descriptor wake_;
  std::thread thread_;  // last member: it uses all of the above
};

uint64_t random_key() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) | device();
}

Descriptor listen_in(const WorldState& world) {
  return listen_for_peers(world.listen_address.empty() ? "127.0.0.1" : world.listen_address);
}

}  // namespace

std::unique_ptr<GossipChannel> open_socket_gossip_channel(const Group& group,
                                                          const std::vector<GossipBuffer>& buffers) {
  const auto& state = state_of(group);
  Descriptor listening;
  std::string line = "-";
  try {
    listening = listen_in(*state->world);
    line = fmt::format("{} {}", place_of(listening), random_key());
  } catch (const std::runtime_error& error) {
    line = fmt::format("- {}", error.what());
  }
  const auto topic = fmt::format("gossip/{}/{}", state->name, state->progress->gossip_channels++);
  const auto lines = store_gather(*state->world, topic, state->world_ranks, state->rank, line);
  std::vector<Address> addresses;
  for (size_t rank = 0; rank < lines.size(); ++rank) {
    if (lines[rank][0] == '-') {
      throw CommError(fmt::format("gossip: rank {} cannot listen: {}", state->world_ranks[rank], lines[rank].substr(2)),
                      static_cast<int>(rank));
    }
    addresses.push_back(address_of(lines[rank]));
  }
  return std::make_unique<SocketChannel>(*state, buffers, std::move(listening), std::move(addresses));
}

std::unique_ptr<GossipChannel> join_socket_gossip_channel(const Group& group, const std::vector<GossipBuffer>& buffers,
                                                          const std::vector<std::string>& addresses) {
  const auto& state = state_of(group);
  try {
    auto listening = listen_in(*state->world);
    std::vector<Address> places;
    for (const auto& address : addresses) places.push_back(address.empty() ? Address() : address_of(address));
    places[state->rank] = {place_of(listening), random_key()};
    return std::make_unique<SocketChannel>(*state, buffers, std::move(listening), std::move(places));
  } catch (const std::runtime_error& error) {
    throw CommError(fmt::format("gossip: this rank cannot listen: {}", error.what()), state->rank);
  }
}

}  // namespace shoal
