#include "shoal/detail/host_shared_buffer.h"

#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>
#include <atomic>

#include "comm/group/group_state.h"
#include "comm/rendezvous/world_state.h"
#include "comm/shm/control_block.h"
#include "comm/shm/wait.h"
#include "shoal/error.h"

namespace shoal {

// State over the shared file: one version per rank, each on cache lines of its own, then the elements.
struct HostSharedBuffer::State {
  explicit State(Group of) : group(std::move(of)) {}

  std::atomic<int64_t>& version(int rank) const {
    return *reinterpret_cast<std::atomic<int64_t>*>(file->data() + rank * shm::cache_line);
  }

  Group group;
  HostSharedBufferOptions options;
  std::vector<Range> owners;
  at::Tensor tensor;
  std::shared_ptr<GroupState> group_state;
  std::shared_ptr<shm::MemoryFile> file;                // set if memory is shared
  std::vector<std::shared_ptr<shm::PeerMemory>> peers;  // peers to wake
  int64_t own_version = 0;
  struct Moving {
    Work work;
    at::Tensor sent;         // data to send: a part of `tensor`, or a rounded copy of one
    at::Tensor destination;  // where the sent data go, on the receivers
  };
  std::vector<Moving> moving;  // without shared memory: the ranges in flight

  void send(int owner, const Range& range, const Label& label) {
    auto part = tensor.narrow(0, range.begin, range.size());
    const auto sent = options.published_as ? part.to(*options.published_as) : part;
    moving.push_back({group.broadcast(sent, owner, label), sent, options.published_as ? part : at::Tensor()});
  }
  void arrive() {
    for (auto& range : moving) {
      range.work.wait();
      if (range.destination.defined()) range.destination.copy_(range.sent);
    }
    moving.clear();
  }
};

namespace {

// Work that waits in slices like any other operation, so that a dead owner is named.
class PublishedWork : public TransportWork {
 public:
  PublishedWork(const HostSharedBuffer::State& state, int64_t version, std::vector<int> owners)
      : state_(state), version_(version), owners_(std::move(owners)) {}

  bool done() override {
    return std::all_of(owners_.begin(), owners_.end(),
                       [this](int rank) { return state_.version(rank).load(std::memory_order_acquire) >= version_; });
  }
  bool wait_for(Milliseconds slice, Milliseconds) override {
    const auto& world = *state_.group_state->world;
    if (shm::wait_until(*world.memory, shm::cores_suffice(world.local_size), slice, [this] { return done(); }))
      return true;
    state_.group_state->progress->transport->require_not_abandoned();
    return false;
  }
  std::string waits_for() override {
    for (const int rank : owners_) {
      const auto has = state_.version(rank).load();
      if (has < version_) {
        return fmt::format("rank {} has published version {}, not {}", state_.group.world_rank(rank), has, version_);
      }
    }
    return "";
  }

 private:
  const HostSharedBuffer::State& state_;
  int64_t version_;
  std::vector<int> owners_;
};

void check(const Group& group, int64_t numel, const std::vector<Range>& owners) {
  if (static_cast<int>(owners.size()) != group.size()) {
    throw UsageError(fmt::format("allocate_host_shared: {} owner ranges for {} ranks", owners.size(), group.size()));
  }
  for (size_t rank = 0; rank < owners.size(); ++rank) {
    if (owners[rank].empty()) continue;
    if (owners[rank].begin < 0 || owners[rank].end > numel) {
      throw UsageError(fmt::format("allocate_host_shared: rank {}'s range [{}, {}) is not within {} elements", rank,
                                   owners[rank].begin, owners[rank].end, numel));
    }
    for (size_t other = 0; other < rank; ++other) {
      if (!owners[rank].intersect(owners[other]).empty()) {
        throw UsageError(fmt::format("allocate_host_shared: the ranges of ranks {} and {} overlap", other, rank));
      }
    }
  }
}

// Rank 0 creates the file, the others open it. Collective.
std::shared_ptr<shm::MemoryFile> share_file(const Group& group, size_t bytes) {
  std::shared_ptr<shm::MemoryFile> file;
  std::string fault;
  auto descriptor = at::full({2}, -1, at::kLong);
  const auto attempt = [&](const auto& act) {
    try {
      file = std::make_shared<shm::MemoryFile>(act());
    } catch (const std::runtime_error& error) {
      fault = error.what();
    }
  };
  const Label label{-1, -1, "one copy per host"};
  if (group.rank() == 0) {
    attempt([&] { return shm::MemoryFile::create(bytes); });
    if (file) {
      descriptor[0] = static_cast<int64_t>(getpid());
      descriptor[1] = file->descriptor();
    }
  }
  group.broadcast(descriptor, 0, label).wait();
  if (group.rank() != 0) {
    attempt([&] {
      return shm::MemoryFile::open(static_cast<int>(descriptor[0].item<int64_t>()),
                                   static_cast<int>(descriptor[1].item<int64_t>()), bytes);
    });
  }
  auto everybody = at::full({1}, file ? 1 : 0, at::kLong);
  group.all_reduce(everybody, ReduceOp::min, label).wait();
  if (everybody.item<int64_t>() == 1) return file;
  throw UsageError(fmt::format("allocate_host_shared: not all ranks can map {} bytes of shared memory{}", bytes,
                               fault.empty() ? "" : ": " + fault));
}

}  // namespace

HostSharedBuffer Group::allocate_host_shared(int64_t numel, const at::TensorOptions& options, std::vector<Range> owners,
                                             const HostSharedBufferOptions& buffer) const {
  check(*this, numel, owners);
  if (buffer.broadcast_numel == 0 || buffer.broadcast_numel < -1) {
    throw UsageError(fmt::format("allocate_host_shared: broadcast_numel {}; give at least 1, or -1 for a whole range",
                                 buffer.broadcast_numel));
  }
  auto state = std::make_shared<HostSharedBuffer::State>(*this);
  state->options = buffer;
  state->owners = std::move(owners);
  state->group_state = state_;
  const auto header = static_cast<size_t>(size()) * shm::cache_line;
  if (transport() == "host" && options.device().is_cpu()) {
    const auto bytes = header + static_cast<size_t>(numel) * options.dtype().itemsize();
    state->file = share_file(*this, bytes);
    state->tensor = at::from_blob(
        state->file->data() + header, {numel}, [file = state->file](void*) {}, options);
    const auto& world = *state_->world;
    for (int other = 0; other < size(); ++other) {
      if (other != rank()) state->peers.push_back(world.memory->peer(world.meeting.peers[world_rank(other)].page));
    }
  } else {
    state->tensor = allocate(numel, options);
  }
  return HostSharedBuffer(std::move(state));
}

HostSharedBuffer::HostSharedBuffer(std::shared_ptr<State> state) : state_(std::move(state)) {}

const at::Tensor& HostSharedBuffer::tensor() const {
  return state_->tensor;
}

const std::vector<Range>& HostSharedBuffer::owners() const {
  return state_->owners;
}

at::Tensor HostSharedBuffer::own() const {
  const auto& range = state_->owners[state_->group.rank()];
  return state_->tensor.narrow(0, range.begin, range.size());
}

bool HostSharedBuffer::shared() const {
  return state_->file != nullptr;
}

void HostSharedBuffer::publish(int64_t version, const Label& label) {
  auto& state = *state_;
  if (version <= state.own_version) {
    throw UsageError(
        fmt::format("publish: version {} after version {}; versions must grow", version, state.own_version));
  }
  state.own_version = version;
  const torch::NoGradGuard no_grad;
  if (state.file) {
    if (state.options.published_as) own().copy_(own().to(*state.options.published_as));
    state.version(state.group.rank()).store(version, std::memory_order_release);
    for (const auto& peer : state.peers) peer->ring();
    return;
  }
  state.arrive();
  for (int rank = 0; rank < state.group.size(); ++rank) {
    const auto& range = state.owners[rank];
    const auto step =
        state.options.broadcast_numel < 0 ? std::max<int64_t>(1, range.size()) : state.options.broadcast_numel;
    for (auto begin = range.begin; begin < range.end; begin += step) {
      state.send(rank, {begin, std::min(range.end, begin + step)}, label);
    }
  }
}

void HostSharedBuffer::wait_published(int64_t version, const Label& label) {
  wait_published(version, {0, state_->tensor.numel()}, label);
}

void HostSharedBuffer::wait_published(int64_t version, const Range& range, const Label& label) {
  auto& state = *state_;
  if (!state.file) {
    if (state.own_version < version) {
      throw UsageError(
          fmt::format("wait_published: version {} was never published; the last is {}", version, state.own_version));
    }
    const torch::NoGradGuard no_grad;
    state.arrive();
    return;
  }
  std::vector<int> owners;
  for (int rank = 0; rank < state.group.size(); ++rank) {
    if (!state.owners[rank].intersect(range).empty()) owners.push_back(rank);
  }
  Call call{.op = Op::all_gather, .inputs = {}, .outputs = {state.tensor}, .label = label};
  wait_for(state.group_state, std::move(call), std::make_unique<PublishedWork>(state, version, std::move(owners)));
}

}  // namespace shoal
