#include "comm/gossip/shared_channel.h"

#include <fmt/format.h>
#include <torch/types.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <sstream>

#include "comm/group/group_state.h"
#include "comm/rendezvous/world_state.h"
#include "comm/shm/control_block.h"
#include "comm/shm/wait.h"
#include "shoal/detail/clock.h"
#include "shoal/error.h"

namespace shoal {
namespace {

constexpr size_t slots = 2;  // a rank may be one step ahead of its readers
constexpr int64_t being_written = -1;

// Block in a rank's own memory: [header | for each buffer: versions, then each reader's progress | data].
class SharedBlock {
 public:
  struct alignas(shm::cache_line) Header {
    std::atomic<uint32_t> users;   // number of ranks that may read this block
    std::atomic<uint32_t> left;    // the rank left on its own
    std::atomic<uint32_t> reason;  // see GossipChannel::stop
    std::atomic<int64_t> stopped;  // last version shown before the stop, + 1; 0: not stopped
  };
  struct alignas(shm::cache_line) Slot {
    std::atomic<int64_t> version;  // 0: none yet
  };

  SharedBlock(const std::vector<GossipBuffer>& buffers, int ranks) : ranks_(ranks) {
    offset_of_data_ = sizeof(Header) + buffers.size() * bytes_of_state();
    for (const auto& buffer : buffers) {
      data_.push_back(offset_of_data_);
      const auto bytes = static_cast<size_t>(buffer.numel) * c10::elementSize(buffer.dtype);
      sizes_.push_back((bytes + page - 1) / page * page);
      offset_of_data_ += slots * sizes_.back();
    }
  }
  size_t bytes() const { return offset_of_data_; }
  static Header& header(std::byte* base) { return *reinterpret_cast<Header*>(base); }
  Slot& slot(std::byte* base, size_t buffer, size_t index) const {
    return reinterpret_cast<Slot*>(base + sizeof(Header) + buffer * bytes_of_state())[index];
  }
  // The newest version that the reader no longer needs.
  std::atomic<int64_t>& done(std::byte* base, size_t buffer, int reader) const {
    auto* first = base + sizeof(Header) + buffer * bytes_of_state() + slots * sizeof(Slot);
    return reinterpret_cast<std::atomic<int64_t>*>(first)[reader];
  }
  std::byte* data(std::byte* base, size_t buffer, size_t index) const {
    return base + data_[buffer] + index * sizes_[buffer];
  }

 private:
  static constexpr size_t page = 4096;
  size_t bytes_of_state() const {
    const auto readers = static_cast<size_t>(ranks_) * sizeof(std::atomic<int64_t>);
    return slots * sizeof(Slot) + (readers + shm::cache_line - 1) / shm::cache_line * shm::cache_line;
  }

  int ranks_;
  size_t offset_of_data_;
  std::vector<size_t> data_;
  std::vector<size_t> sizes_;
};

// Inverse of SharedChannel::address.
shm::Place place_of_memory(const std::string& address) {
  shm::Place place;
  std::istringstream in(address.substr(std::string(shared_memory).size()));
  in >> place.arena >> place.offset;
  return place;
}

CommError unreachable(const GroupState& group, int rank, const std::exception& error) {
  return CommError(fmt::format("gossip: rank {} cannot be reached: {}", group.world_ranks[rank], error.what()), rank);
}

class SharedChannel : public GossipChannel {
 public:
  SharedChannel(std::shared_ptr<GroupState> group, std::vector<GossipBuffer> buffers, SharedBlock layout,
                std::vector<std::byte*> bases, std::vector<std::shared_ptr<shm::PeerMemory>> peers)
      : group_(std::move(group)),
        buffers_(std::move(buffers)),
        layout_(std::move(layout)),
        bases_(std::move(bases)),
        peers_(std::move(peers)),
        ended_(bases_.size(), false),
        late_source_(bases_.size(), false),
        late_reader_(bases_.size(), false),
        looked_(bases_.size()),
        last_read_(buffers_.size(), std::vector<int64_t>(bases_.size(), 0)),
        readers_(buffers_.size()),
        newest_(buffers_.size(), slots - 1) {
    may_spin_ = shm::cores_suffice(group_->world->local_size);
    for (size_t rank = 0; rank < bases_.size(); ++rank) ended_[rank] = bases_[rank] == nullptr;
  }

  ~SharedChannel() override {
    leave();
    for (auto* base : bases_) {
      if (base != nullptr) SharedBlock::header(base).users.fetch_sub(1);
    }
    auto* memory = group_->world->memory.get();
    memory->retire([memory, own = own()] {
      if (SharedBlock::header(own).users.load() != 0) return false;
      memory->free(own);
      return true;
    });
  }

  at::Tensor draft(size_t buffer, Limit limit) override {
    const auto index = (newest_[buffer] + 1) % slots;
    auto& slot = layout_.slot(own(), buffer, index);
    const auto version = slot.version.load(std::memory_order_relaxed);
    const auto deadline = Clock::now() + limit;
    for (const int reader : readers_[buffer][index]) {
      const auto done = [&] { return layout_.done(own(), buffer, reader).load() >= version; };
      if (!late_reader_[reader]) wait(deadline, reader, done);
      late_reader_[reader] = !done();
    }
    slot.version.store(being_written, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);  // a reader that sees new values must see this, too
    return tensor(own(), buffer, index);
  }

  void publish(size_t buffer, int64_t version, const std::vector<int>& readers) override {
    const auto index = newest_[buffer] = (newest_[buffer] + 1) % slots;
    readers_[buffer][index] = readers;
    layout_.slot(own(), buffer, index).version.store(version, std::memory_order_release);
    for (const int reader : readers) ring(reader);
  }

  Reading read(size_t buffer, int64_t version, int source, Limit limit, const Use& use) override {
    auto* base = bases_[source];
    auto found = find(buffer, version, source);
    if (!found && !late_source_[source]) {
      wait(Clock::now() + limit, source, [&] { return (found = find(buffer, version, source)).has_value(); });
    }
    if (!found) found = find(buffer, last_read_[buffer][source] + 1, source);
    Reading result{.arrival = found ? Arrival::here : ended(source) ? Arrival::gone : Arrival::late};
    if (found) {
      use(tensor(base, buffer, found->index));
      std::atomic_thread_fence(std::memory_order_seq_cst);
      const auto now = layout_.slot(base, buffer, found->index).version.load(std::memory_order_relaxed);
      if (now != found->version) result.arrival = Arrival::torn;
      result.version = found->version;
      last_read_[buffer][source] = std::max(last_read_[buffer][source], found->version);
    }
    late_source_[source] = !found || found->version < version;
    // Marks `version` only: a newer version that was read is read again next, or this rank would find too new a version
    // in every following step.
    layout_.done(base, buffer, group_->rank).store(version, std::memory_order_release);
    ring(source);
    return result;
  }

  bool gone(int rank, int64_t version) override {
    if (rank == group_->rank || !ended(rank)) return false;
    for (size_t buffer = 0; buffer < buffers_.size(); ++buffer) {
      if (!find(buffer, version, rank)) return true;
    }
    return false;
  }

  bool lost(int rank) override {
    if (rank == group_->rank || !ended(rank)) return false;
    return bases_[rank] == nullptr || SharedBlock::header(bases_[rank]).left.load() == 0;
  }

  void forget() override {
    for (auto& readers : readers_) readers = {};
  }

  void stop(int64_t version, uint32_t reason) override {
    auto& header = SharedBlock::header(own());
    header.reason.store(reason, std::memory_order_relaxed);
    header.stopped.store(version + 1, std::memory_order_release);
    ring_all();
  }

  std::optional<Stop> stopped(int rank) override {
    if (!stops(rank)) return std::nullopt;
    const auto& header = SharedBlock::header(bases_[rank]);
    const auto version = header.stopped.load(std::memory_order_acquire) - 1;
    return Stop{.version = version, .reason = header.reason.load(std::memory_order_relaxed)};
  }

  void start_afresh(int64_t version) override {
    forget();
    begun_ = version;
    late_source_.assign(late_source_.size(), false);
    late_reader_.assign(late_reader_.size(), false);
  }

  void leave() override {
    if (SharedBlock::header(own()).left.exchange(1) == 0) ring_all();
  }

  // Maps the block of a rank that has none here. std::runtime_error if its memory cannot be opened.
  void map(int rank, const shm::Place& place) {
    bases_[rank] = peers_[rank]->at(place);
    ended_[rank] = false;
  }

  std::string address() const override {
    const auto place = *group_->world->memory->locate(own(), 1);
    return fmt::format("{}{} {}", shared_memory, place.arena, place.offset);
  }

  void admit(int rank, const std::string& address) override {
    peers_[rank] = group_->world->memory->peer(group_->world->meeting.peers[group_->world_ranks[rank]].page);
    map(rank, place_of_memory(address));
    late_source_[rank] = late_reader_[rank] = false;
    for (size_t buffer = 0; buffer < buffers_.size(); ++buffer) {
      last_read_[buffer][rank] = 0;
      layout_.done(own(), buffer, rank).store(0);
    }
  }

 private:
  std::byte* own() const { return bases_[group_->rank]; }
  bool ended(int rank) {
    if (ended_[rank]) return true;
    if (SharedBlock::header(bases_[rank]).left.load() != 0) return ended_[rank] = true;
    const auto now = Clock::now();
    if (now - looked_[rank] < std::chrono::milliseconds(50)) return false;
    looked_[rank] = now;
    return ended_[rank] = state_of(process(rank)) == ProcessState::gone;
  }
  const ProcessId& process(int rank) const { return group_->world->meeting.peers[group_->world_ranks[rank]].process; }
  bool stops(int rank) const {
    return bases_[rank] != nullptr && SharedBlock::header(bases_[rank]).stopped.load() - 1 > begun_;
  }
  void ring_all() const {
    for (const auto& peer : peers_) {
      if (peer) peer->ring();
    }
  }
  void ring(int rank) const {
    if (peers_[rank]) peers_[rank]->ring();
  }
  at::Tensor tensor(std::byte* base, size_t buffer, size_t index) const {
    return at::from_blob(layout_.data(base, buffer, index), {buffers_[buffer].numel},
                         at::TensorOptions(buffers_[buffer].dtype));
  }
  struct Found {
    size_t index;
    int64_t version;
  };
  // The oldest shown version that is at least `version`. The source may show two versions between the looks at its
  // slots, so that an older one appears in a slot after that slot was looked at. The search repeats until nothing older
  // is found.
  std::optional<Found> find(size_t buffer, int64_t version, int source) const {
    std::optional<Found> found;
    for (bool look_again = true; look_again;) {
      look_again = false;
      for (size_t index = 0; index < slots; ++index) {
        const auto shown = layout_.slot(bases_[source], buffer, index).version.load(std::memory_order_acquire);
        if (shown < version || (found && shown >= found->version)) continue;
        found = Found{index, shown};
        look_again = true;
      }
    }
    return found;
  }
  // Waits for `finished`, the deadline, or the end or stop of the rank.
  void wait(Clock::time_point deadline, int on, const std::function<bool()>& finished) {
    while (!finished() && !ended(on) && !stops(on)) {
      const auto left = deadline - Clock::now();
      if (left <= left.zero()) return;
      const auto slice = std::min<std::chrono::nanoseconds>(left, std::chrono::milliseconds(100));
      shm::wait_until(*group_->world->memory, may_spin_, slice,
                      [&] { return finished() || SharedBlock::header(bases_[on]).left.load() != 0 || stops(on); });
    }
  }

  std::shared_ptr<GroupState> group_;
  const std::vector<GossipBuffer> buffers_;
  const SharedBlock layout_;
  std::vector<std::byte*> bases_;  // by rank: its block as mapped here; nullptr: the rank has ended
  std::vector<std::shared_ptr<shm::PeerMemory>> peers_;  // nullptr for this rank
  bool may_spin_ = false;
  int64_t begun_ = -1;  // stops up to this version have ended
  std::vector<bool> ended_;
  std::vector<bool> late_source_;  // by source: the last wait for it timed out
  std::vector<bool> late_reader_;  // by reader: the last wait for it timed out
  std::vector<Clock::time_point> looked_;
  std::vector<std::vector<int64_t>> last_read_;  // by buffer and source
  struct Readers {
    std::vector<int> of[slots];
    std::vector<int>& operator[](size_t index) { return of[index]; }
  };
  std::vector<Readers> readers_;
  std::vector<size_t> newest_;  // by buffer: slot of the newest version
};

}  // namespace

std::unique_ptr<GossipChannel> open_shared_gossip_channel(const Group& group,
                                                          const std::vector<GossipBuffer>& buffers) {
  const auto& state = state_of(group);
  const auto& world = *state->world;
  const Label label{-1, -1, "gossip buffers"};
  const auto host = [&](int rank) { return world.meeting.peers[state->world_ranks[rank]].host; };
  for (int rank = 0; rank < group.size(); ++rank) {
    if (host(rank) != host(group.rank())) return nullptr;
  }
  SharedBlock layout(buffers, group.size());
  auto places = at::full({group.size(), 2}, -1, at::kLong);
  auto own = at::full({2}, -1, at::kLong);
  std::byte* base = nullptr;
  std::unique_ptr<SharedChannel> channel;  // frees the block if not all ranks get as far as this one
  try {
    if (!world.memory) throw std::runtime_error("this system gave no shared memory");
    std::vector<std::shared_ptr<shm::PeerMemory>> peers(group.size());
    std::vector<std::byte*> bases(group.size());
    for (int rank = 0; rank < group.size(); ++rank) {
      if (rank != group.rank()) peers[rank] = world.memory->peer(world.meeting.peers[state->world_ranks[rank]].page);
    }
    base = bases[group.rank()] = world.memory->allocate(layout.bytes());
    SharedBlock::header(base).users = static_cast<uint32_t>(group.size());
    channel = std::make_unique<SharedChannel>(state, buffers, std::move(layout), std::move(bases), std::move(peers));
    const auto place = *world.memory->locate(base, 1);
    own[0] = static_cast<int64_t>(place.arena);
    own[1] = static_cast<int64_t>(place.offset);
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): -1 tells the others
  }
  group.all_gather(places, own, label).wait();
  if (places.min().item<int64_t>() < 0) {
    if (base != nullptr) SharedBlock::header(base).users = 1;  // nobody opens it
    return nullptr;
  }
  for (int rank = 0; rank < group.size(); ++rank) {
    if (rank == group.rank()) continue;
    try {
      channel->map(rank, {static_cast<uint32_t>(places[rank][0].item<int64_t>()),
                          static_cast<uint64_t>(places[rank][1].item<int64_t>())});
    } catch (const std::runtime_error& error) {
      throw unreachable(*state, rank, error);
    }
  }
  // No rank leaves before all have mapped all blocks.
  group.barrier(label).wait();
  return channel;
}

std::unique_ptr<GossipChannel> join_shared_gossip_channel(const Group& group, const std::vector<GossipBuffer>& buffers,
                                                          const std::vector<std::string>& addresses) {
  const auto& state = state_of(group);
  const auto& world = *state->world;
  SharedBlock layout(buffers, group.size());
  std::vector<std::shared_ptr<shm::PeerMemory>> peers(group.size());
  std::vector<std::byte*> bases(group.size());
  uint32_t users = 1;
  for (int rank = 0; rank < group.size(); ++rank) {
    if (rank == group.rank() || addresses[rank].empty()) continue;
    try {
      if (!world.memory) throw std::runtime_error("this system gave no shared memory");
      peers[rank] = world.memory->peer(world.meeting.peers[state->world_ranks[rank]].page);
      bases[rank] = peers[rank]->at(place_of_memory(addresses[rank]));
    } catch (const std::runtime_error& error) {
      throw unreachable(*state, rank, error);
    }
    ++users;
  }
  auto* base = bases[group.rank()] = world.memory->allocate(layout.bytes());
  SharedBlock::header(base).users = users;
  return std::make_unique<SharedChannel>(state, buffers, std::move(layout), std::move(bases), std::move(peers));
}

}  // namespace shoal
