#include "comm/shm/host_memory.h"

#include <fmt/format.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <csignal>
#include <random>

#include "shoal/error.h"

namespace shoal::shm {
namespace {

constexpr size_t page_bytes = 4096;

size_t whole_pages(size_t bytes) {
  return (std::max<size_t>(bytes, 1) + page_bytes - 1) / page_bytes * page_bytes;
}

// Not FUTEX_PRIVATE, because several processes map the word.
void futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

uint64_t random_number() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

void ring_bell(ProcessPage& page) {
  page.bell.fetch_add(1);
  if (page.sleepers.load() != 0) futex(page.bell, FUTEX_WAKE, INT_MAX, nullptr);
}

static_assert(sizeof(ProcessPage) <= page_bytes && std::atomic<uint32_t>::is_always_lock_free);

}  // namespace

PeerMemory::PeerMemory(const PageAddress& address)
    : pid_(address.pid),
      page_file_(MemoryFile::open(address.pid, address.descriptor, page_bytes)),
      page_(reinterpret_cast<ProcessPage*>(page_file_.data())) {
  if (page_->nonce != address.nonce) {
    throw std::runtime_error(fmt::format("process {} shows other memory than the peer's", address.pid));
  }
}

void PeerMemory::map_to(uint32_t arena) {
  while (arenas_.size() <= arena) {
    const auto index = arenas_.size();
    if (index >= page_->arena_count.load(std::memory_order_acquire)) {
      throw std::runtime_error(fmt::format("process {} named an arena that it does not have", pid_));
    }
    const auto& next = page_->arenas[index];
    arenas_.push_back(MemoryFile::open(pid_, next.descriptor, next.bytes));
  }
}

std::byte* PeerMemory::at(const Place& place) {
  const std::lock_guard lock(mutex_);
  map_to(place.arena);
  return arenas_[place.arena].data() + place.offset;
}

void PeerMemory::map_arenas() {
  const std::lock_guard lock(mutex_);
  const auto count = page_->arena_count.load(std::memory_order_acquire);
  if (count > 0) map_to(count - 1);
}

void PeerMemory::unmap_arenas() {
  const std::lock_guard lock(mutex_);
  arenas_.clear();
}

int PeerMemory::blamed() const {
  return page_->blamed.load() - 1;
}

bool PeerMemory::gone() const {
  return kill(pid_, 0) != 0 && errno == ESRCH;
}

void PeerMemory::ring() const {
  ring_bell(*page_);
}

HostMemory::HostMemory()
    : pid_(getpid()),
      page_file_(MemoryFile::create(page_bytes)),
      page_(reinterpret_cast<ProcessPage*>(page_file_.data())) {
  page_->nonce = random_number();
}

HostMemory::~HostMemory() = default;

bool HostMemory::is_forked_copy() const {
  return getpid() != pid_;
}

void HostMemory::wake() {
  ring_bell(*page_);
}

PageAddress HostMemory::address() const {
  return {pid_, page_file_.descriptor(), page_->nonce};
}

void HostMemory::blame(int world_rank) {
  int nobody = 0;
  page_->blamed.compare_exchange_strong(nobody, world_rank + 1);
}

std::shared_ptr<PeerMemory> HostMemory::peer(const PageAddress& address) {
  const std::lock_guard lock(mutex_);
  auto& peer = peers_[address.nonce];
  if (!peer) peer = std::make_shared<PeerMemory>(address);
  return peer;
}

void HostMemory::keep_peers(const std::vector<PageAddress>& addresses) {
  const std::lock_guard lock(mutex_);
  std::erase_if(peers_, [&](const auto& peer) {
    return std::none_of(addresses.begin(), addresses.end(),
                        [&](const PageAddress& address) { return address.nonce == peer.first; });
  });
}

void HostMemory::interrupt_by(std::shared_ptr<const WaitInterruption> interruption) {
  const std::lock_guard lock(interruption_mutex_);
  interruption_ = std::move(interruption);
}

bool HostMemory::interrupted() const {
  const std::lock_guard lock(interruption_mutex_);
  return interruption_ && interruption_->raised();
}

void HostMemory::attach(Pollable& pollable) {
  const std::unique_lock lock(poll_mutex_);
  pollables_.push_back(&pollable);
}

void HostMemory::detach(Pollable& pollable) {
  const std::unique_lock lock(poll_mutex_);
  std::erase(pollables_, &pollable);
}

void HostMemory::poll() {
  const std::shared_lock lock(poll_mutex_);
  for (auto* pollable : pollables_) pollable->poll();
}

bool HostMemory::in_flight() {
  const std::shared_lock lock(poll_mutex_);
  return std::any_of(pollables_.begin(), pollables_.end(), [](auto* pollable) { return pollable->in_flight(); });
}

std::byte* HostMemory::allocate_in(Arena& arena, size_t bytes) {
  const auto found =
      std::find_if(arena.free.begin(), arena.free.end(), [&](auto& hole) { return hole.second >= bytes; });
  if (found == arena.free.end()) return nullptr;
  const auto [offset, hole] = *found;
  arena.free.erase(found);
  if (hole > bytes) arena.free.emplace(offset + bytes, hole - bytes);
  arena.used.emplace(offset, bytes);
  return arena.file.data() + offset;
}

std::byte* HostMemory::allocate(size_t bytes) {
  if (is_forked_copy()) {
    throw UsageError(fmt::format("shared memory of process {} cannot be allocated in a process forked from it", pid_));
  }
  try_retired();
  const std::lock_guard lock(mutex_);
  bytes = whole_pages(bytes);
  for (auto& arena : arenas_) {
    if (auto* data = allocate_in(arena, bytes)) return data;
  }
  if (arenas_.size() == ProcessPage::max_arenas) throw UsageError("shared memory: too many arenas in one process");
  Arena arena;
  const auto total = std::max(bytes, arena_bytes);
  try {
    arena.file = MemoryFile::create(total);
  } catch (const std::runtime_error& error) {
    throw UsageError(
        fmt::format("cannot get shared memory ({}); raise the limit on memory or descriptors, or use "
                    "transport tcp",
                    error.what()));
  }
  arena.free.emplace(0, total);
  page_->arenas[arenas_.size()] = {arena.file.descriptor(), total};
  arenas_.push_back(std::move(arena));
  page_->arena_count.store(static_cast<uint32_t>(arenas_.size()), std::memory_order_release);
  return allocate_in(arenas_.back(), bytes);
}

void HostMemory::retire(std::function<bool()> try_free, std::function<void()> unread) {
  {
    const std::lock_guard lock(retired_mutex_);
    retired_.push_back({std::move(try_free), std::move(unread)});
  }
  try_retired();
}

std::vector<HostMemory::RetiredBlock> HostMemory::take_retired() {
  const std::lock_guard lock(retired_mutex_);
  return std::exchange(retired_, {});
}

void HostMemory::free_retired() {
  auto blocks = take_retired();
  std::erase_if(blocks, [](const RetiredBlock& block) {
    if (block.unread) block.unread();
    return block.unread != nullptr;
  });
  const std::lock_guard lock(retired_mutex_);
  retired_.insert(retired_.end(), blocks.begin(), blocks.end());
}

void HostMemory::try_retired() {
  auto blocks = take_retired();
  std::erase_if(blocks, [](const RetiredBlock& block) { return block.try_free(); });
  const std::lock_guard lock(retired_mutex_);
  retired_.insert(retired_.end(), blocks.begin(), blocks.end());
}

void HostMemory::free(std::byte* data) {
  if (is_forked_copy()) return;  // the parent still uses it
  const std::lock_guard lock(mutex_);
  for (auto& arena : arenas_) {
    if (data < arena.file.data() || data >= arena.file.data() + arena.file.size()) continue;
    const auto block = arena.used.find(static_cast<size_t>(data - arena.file.data()));
    auto [offset, bytes] = *block;
    arena.used.erase(block);
    arena.file.discard(offset, bytes);
    auto next = arena.free.lower_bound(offset);
    if (next != arena.free.end() && next->first == offset + bytes) {
      bytes += next->second;
      next = arena.free.erase(next);
    }
    if (next != arena.free.begin()) {
      auto previous = std::prev(next);
      if (previous->first + previous->second == offset) {
        previous->second += bytes;
        return;
      }
    }
    arena.free.emplace(offset, bytes);
    return;
  }
}

std::optional<Place> HostMemory::locate(const void* data, size_t bytes) const {
  const std::lock_guard lock(mutex_);
  const auto* begin = static_cast<const std::byte*>(data);
  for (size_t index = 0; index < arenas_.size(); ++index) {
    const auto& file = arenas_[index].file;
    if (begin < file.data() || begin + bytes > file.data() + file.size()) continue;
    return Place{static_cast<uint32_t>(index), static_cast<uint64_t>(begin - file.data())};
  }
  return std::nullopt;
}

std::byte* HostMemory::at(const Place& place) const {
  const std::lock_guard lock(mutex_);
  return arenas_.at(place.arena).file.data() + place.offset;
}

uint32_t HostMemory::bell() const {
  return page_->bell.load();
}

void HostMemory::prepare_sleep() {
  page_->sleepers.fetch_add(1);
}

void HostMemory::cancel_sleep() {
  page_->sleepers.fetch_sub(1);
}

void HostMemory::sleep(uint32_t seen, std::chrono::nanoseconds timeout) {
  const timespec limit{static_cast<time_t>(timeout.count() / 1'000'000'000), timeout.count() % 1'000'000'000};
  futex(page_->bell, FUTEX_WAIT, seen, &limit);
  cancel_sleep();
}

size_t HostMemory::bytes_in_use() const {
  const std::lock_guard lock(mutex_);
  size_t total = 0;
  for (const auto& arena : arenas_) {
    for (const auto& [offset, bytes] : arena.used) total += bytes;
  }
  return total;
}

}  // namespace shoal::shm
