#include "comm/gossip/socket_channel.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <torch/types.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <thread>

#include "base/start_thread.h"
#include "comm/gossip/peers.h"
#include "comm/gossip/values_pool.h"
#include "comm/gossip/visitors.h"
#include "comm/group/group_state.h"
#include "comm/rendezvous/world_state.h"
#include "comm/store/store_gather.h"
#include "shoal/detail/clock.h"
#include "shoal/error.h"
#include "shoal/telemetry.h"

namespace shoal {
namespace {

// Channel whose own thread moves all bytes; the rank's thread only reads what has arrived and queues what is to be
// sent.
class SocketChannel : public GossipChannel {
 public:
  SocketChannel(const GroupState& group, std::vector<GossipBuffer> buffers, Descriptor listening,
                std::vector<GossipAddress> addresses)
      : group_(group.name),
        timeline_(group.world->options.timeline),
        memory_(group.world->memory),
        values_(std::move(buffers)),
        peers_(group.rank, std::move(addresses), group.world->placement.job),
        visitors_(std::move(listening), peers_, values_,
                  [this](const Frame& frame, Clock::time_point begin) { note(frame, begin); }),
        drafts_(values_.size()),
        shown_(values_.size()),
        wake_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    thread_ = start_thread("exchanges parameters with peers", [this] { run(); });
  }

  ~SocketChannel() override {
    leave();
    {
      // Sends what neighbours still wait for, bounded by a limit for neighbours that receive nothing.
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, std::chrono::seconds(2), [this] { return peers_.all_sent(); });
      ending_ = true;
    }
    wake();
    thread_.join();
  }

  at::Tensor draft(size_t buffer, Limit limit) override {
    std::unique_lock lock(mutex_);
    const auto deadline = Clock::now() + limit;
    auto& shown = shown_[buffer];
    while (shown.size() >= GossipPeers::versions_ahead) {
      for (const int reader : shown.front().readers) {
        auto& peer = peers_[reader];
        const auto taken = [&] { return peer.gone || peer.taken[buffer] >= shown.front().version; };
        if (!peer.takes_late) wait(lock, deadline, [&] { return taken() || peers_.stops(reader); });
        peer.takes_late = !taken();
      }
      shown.pop_front();
    }
    return drafts_[buffer] = values_.get(buffer);
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
        peers_.put(
            reader,
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
        peers_.put(source, {.kind = FrameKind::taken, .buffer = static_cast<uint32_t>(buffer), .version = version});
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
    for (size_t buffer = 0; buffer < values_.size(); ++buffer) {
      const auto shown = peer.shown.find(buffer);
      if (shown == peer.shown.end() || shown->second.lower_bound(version) == shown->second.end()) return true;
    }
    return values_.size() == 0;
  }

  bool lost(int rank) override {
    const std::lock_guard lock(mutex_);
    return peers_[rank].gone && !peers_[rank].left;
  }

  void forget() override {
    const std::lock_guard lock(mutex_);
    for (auto& shown : shown_) shown.clear();
  }

  void stop(int64_t version, uint32_t reason) override {
    {
      const std::lock_guard lock(mutex_);
      peers_.tell_all({.kind = FrameKind::stop, .buffer = reason, .version = version});
    }
    wake();
  }

  std::optional<Stop> stopped(int rank) override {
    const std::lock_guard lock(mutex_);
    return peers_.stops(rank) ? peers_[rank].stop : std::nullopt;
  }

  void start_afresh(int64_t version) override {
    const std::lock_guard lock(mutex_);
    for (auto& shown : shown_) shown.clear();
    peers_.start_afresh(version);
  }

  void leave() override {
    {
      const std::lock_guard lock(mutex_);
      peers_.leave(newest_);
    }
    wake();
  }

  std::string address() const override { return to_line(peers_.own_address()); }

  void admit(int rank, const std::string& address) override {
    const std::lock_guard lock(mutex_);
    peers_.admit(rank, read_gossip_address(address, rank));
    visitors_.forget(rank);  // data from the previous process, and its end, no longer matter
  }

 private:
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
      wait(lock, Clock::now() + limit, [&] { return found() || peer.gone || peers_.stops(source); });
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
  void wait(std::unique_lock<std::mutex>& lock, Clock::time_point end, const std::function<bool()>& done) {
    constexpr auto slice = std::chrono::milliseconds(20);
    while (!changed_.wait_until(lock, std::min(end, Clock::now() + slice), done)) {
      if (Clock::now() >= end || (memory_ && memory_->interrupted())) return;
    }
  }

  void wake() const {
    const uint64_t one = 1;
    [[maybe_unused]] const auto written = write(wake_.number(), &one, sizeof one);
  }

  void run() {
    constexpr std::chrono::seconds between_looks(1);
    std::vector<pollfd> polled;
    bool held_back = false;
    auto next_look = Clock::now() + between_looks;
    while (true) {
      polled.clear();
      {
        const std::lock_guard lock(mutex_);
        if (ending_) return;
        held_back = peers_.send(polled);
        visitors_.wait_for(polled);
      }
      changed_.notify_all();
      polled.push_back({wake_.number(), POLLIN, 0});
      poll(polled.data(), polled.size(), held_back ? 20 : 500);
      uint64_t rung = 0;
      [[maybe_unused]] const auto got = ::read(wake_.number(), &rung, sizeof rung);
      const std::lock_guard lock(mutex_);
      visitors_.receive();
      if (Clock::now() < next_look) continue;
      peers_.look_at_hosts();
      next_look = Clock::now() + between_looks;
    }
  }

  void note(const Frame& frame, Clock::time_point begin) const {
    if (!timeline_) return;
    timeline_->add(
        {.category = "exchange",
         .name = "values",
         .group = group_,
         .label = {frame.version, static_cast<int64_t>(frame.buffer), fmt::format("of rank {}", frame.source)},
         .bytes = static_cast<int64_t>(frame.bytes),
         .begin = begin,
         .end = Clock::now()});
  }

  // Last values read, of one buffer and for one version, by source: the reader may have to start over.
  struct Used {
    size_t buffer = 0;
    int64_t version = 0;
    std::map<int, std::pair<int64_t, at::Tensor>> values{};
  };

  struct Shown {
    int64_t version;
    std::vector<int> readers;
  };

  const std::string group_;
  const std::shared_ptr<Timeline> timeline_;
  const std::shared_ptr<shm::HostMemory> memory_;  // knows of ranks that have ended
  std::mutex mutex_;                               // guards what follows
  std::condition_variable changed_;
  ValuesPool values_;
  GossipPeers peers_;
  GossipVisitors visitors_;
  std::vector<at::Tensor> drafts_;
  Used used_;                             // used by the rank's own thread
  std::vector<std::deque<Shown>> shown_;  // last versions, by buffer
  int64_t newest_ = 0;                    // newest version shown
  bool ending_ = false;
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
    line = to_line({place_of(listening), random_key()});
  } catch (const std::runtime_error& error) {
    line = fmt::format("- {}", error.what());
  }
  const auto topic = fmt::format("gossip/{}/{}", state->name, state->progress->gossip_channels++);
  const auto lines =
      store_gather(*state->world, topic, state->world_ranks, state->rank, line, state->world->rendezvous_limit());
  std::vector<GossipAddress> addresses;
  for (size_t rank = 0; rank < lines.size(); ++rank) {
    if (lines[rank][0] == '-') {
      throw CommError(fmt::format("gossip: rank {} cannot listen: {}", state->world_ranks[rank], lines[rank].substr(2)),
                      static_cast<int>(rank));
    }
    addresses.push_back(read_gossip_address(lines[rank], state->world_ranks[rank]));
  }
  return std::make_unique<SocketChannel>(*state, buffers, std::move(listening), std::move(addresses));
}

std::unique_ptr<GossipChannel> join_socket_gossip_channel(const Group& group, const std::vector<GossipBuffer>& buffers,
                                                          const std::vector<std::string>& addresses) {
  const auto& state = state_of(group);
  std::vector<GossipAddress> places(addresses.size());
  for (size_t rank = 0; rank < addresses.size(); ++rank) {
    if (!addresses[rank].empty()) places[rank] = read_gossip_address(addresses[rank], state->world_ranks[rank]);
  }
  try {
    auto listening = listen_in(*state->world);
    places[state->rank] = {place_of(listening), random_key()};
    return std::make_unique<SocketChannel>(*state, buffers, std::move(listening), std::move(places));
  } catch (const std::runtime_error& error) {
    throw CommError(fmt::format("gossip: this rank cannot listen: {}", error.what()), state->rank);
  }
}

}  // namespace shoal
