#pragma once
// Shared memory of the processes of a host: for each process a page with its doorbell and arena table, and arenas, from
// which shared buffers are allocated.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <vector>

#include "comm/shm/host_load.h"
#include "comm/shm/memory_file.h"
#include "comm/shm/notice.h"
#include "comm/shm/spin_limit.h"

namespace shoal::shm {

// Minimum size of an arena; pages cost memory once they are used.
inline constexpr size_t arena_bytes = size_t{256} << 20;

// Address within one process's arenas, valid in all processes of the host.
struct Place {
  uint32_t arena = 0;
  uint64_t offset = 0;
};

// First page of a process's shared memory, mapped by all its peers.
struct ProcessPage {
  static constexpr uint32_t max_arenas = 200;
  struct Arena {
    int32_t descriptor;
    uint64_t bytes;
  };
  uint64_t nonce;                     // proves that a peer has opened the right memory
  std::atomic<uint32_t> bell;         // number of events that concern this process
  std::atomic<uint32_t> sleepers;     // number of threads that wait for the bell in the kernel
  std::atomic<uint32_t> arena_count;  // number of valid entries of `arenas`
  std::atomic<int32_t> blamed;        // world rank that caused this rank's failure, plus one; 0: none
  Arena arenas[max_arenas];
  Notice notice;  // what the process shows its peers; see membership/board.h
};

// Address of a process's page; exchanged at the rendezvous.
struct PageAddress {
  int pid = 0;
  int descriptor = -1;
  uint64_t nonce = 0;
};

// A peer's memory as mapped here. Thread-safe.
class PeerMemory {
 public:
  // Throws std::runtime_error if the peer's memory cannot be opened.
  explicit PeerMemory(const PageAddress& address);

  std::byte* at(const Place& place);
  // Maps all arenas that the peer has at present, so that at() works after its death. std::runtime_error if it has
  // ended.
  void map_arenas();
  // For a peer that has ended and whose memory nobody uses any more.
  void unmap_arenas();
  // Whether its process has ended, as far as a signal can tell.
  bool gone() const;
  // Wakes the peer, because something that it may wait for has happened.
  void ring() const;
  // The rank that the peer blamed; -1: none. Readable after the peer's death.
  int blamed() const;
  // What the peer shows. Readable after its death.
  Notice::Words notice() const { return page_->notice.read(); }

 private:
  // Maps arenas up to this one. mutex_ is held.
  void map_to(uint32_t arena);

  int pid_;
  MemoryFile page_file_;
  ProcessPage* page_;
  std::mutex mutex_;
  std::vector<MemoryFile> arenas_;
};

// Object that can progress when a peer has done its part; see HostMemory::poll.
class Pollable {
 public:
  virtual ~Pollable() = default;
  virtual void poll() noexcept = 0;
  // Whether it has anything left to progress.
  virtual bool in_flight() = 0;
};

// Reason to end waits for peers early.
class WaitInterruption {
 public:
  virtual ~WaitInterruption() = default;
  virtual bool raised() const noexcept = 0;
};

// This process's shared memory, and access to that of its peers. Thread-safe.
class HostMemory {
 public:
  HostMemory();
  ~HostMemory();

  PageAddress address() const;
  // A forked child shares the parent's memory, and must neither free nor allocate in it.
  bool is_forked_copy() const;

  // Tells all peers, including later ones, which world rank caused this process's failure. The first call counts.
  void blame(int world_rank);

  // Opens a peer's memory once and keeps it. Throws std::runtime_error if it cannot be opened.
  std::shared_ptr<PeerMemory> peer(const PageAddress& address);
  // Forgets all peers but these. What still uses one keeps it mapped.
  void keep_peers(const std::vector<PageAddress>& addresses);

  // Replaces what this process shows its peers. For one thread at a time.
  void show(const Notice::Words& words) { page_->notice.write(words); }

  // Waits for peers end early while this is raised; nullptr: never.
  void interrupt_by(std::shared_ptr<const WaitInterruption> interruption);
  bool interrupted() const;

  // poll() progresses all attached objects. A rank that waits for one group must progress the operations of all others,
  // because a peer may wait for those first.
  void attach(Pollable& pollable);
  void detach(Pollable& pollable);
  void poll();
  bool in_flight();

  // Returns `bytes` zeros, aligned to a page. UsageError if the system has no memory left.
  std::byte* allocate(size_t bytes);
  // Returns the memory to the system at once. No peer may use it any more.
  void free(std::byte* data);
  // Frees memory that peers may still read: calls `try_free` now, and again at every allocation and free, until it
  // returns true. unread: called instead by free_retired().
  void retire(std::function<bool()> try_free, std::function<void()> unread = {});
  // Frees what was retired, because no peer reads it any more.
  void free_retired();
  // Place of [data, data + bytes), if it lies within one block of this heap.
  std::optional<Place> locate(const void* data, size_t bytes) const;
  std::byte* at(const Place& place) const;

  // Value for sleep(); read it before the last check of the condition.
  uint32_t bell() const;
  // Registers a sleeper; until it is cancelled, every ring() costs its sender a system call.
  void prepare_sleep();
  void cancel_sleep();
  // Wakes this process's own sleepers.
  void wake();
  // How long waits for peers poll, and whether that takes a core from others.
  SpinLimit& spin_limit() { return spin_limit_; }
  HostLoad& host_load() { return host_load_; }
  // Blocks until the bell has rung since `seen`, or until the timeout. Unregisters the sleeper.
  void sleep(uint32_t seen, std::chrono::nanoseconds timeout);

  size_t bytes_in_use() const;
  uint32_t arenas() const { return page_->arena_count.load(); }  // their number, which never falls

 private:
  struct Arena {
    MemoryFile file;
    std::map<size_t, size_t> free;  // offset -> bytes
    std::map<size_t, size_t> used;
  };
  struct RetiredBlock {
    std::function<bool()> try_free;
    std::function<void()> unread;
  };
  std::byte* allocate_in(Arena& arena, size_t bytes);
  std::vector<RetiredBlock> take_retired();
  void try_retired();

  const int pid_;  // a forked child has another pid
  SpinLimit spin_limit_;
  HostLoad host_load_;
  MemoryFile page_file_;
  ProcessPage* page_;
  std::shared_mutex poll_mutex_;
  std::vector<Pollable*> pollables_;
  mutable std::mutex mutex_;
  std::map<uint64_t, std::shared_ptr<PeerMemory>> peers_;  // by nonce, because pids are reused
  std::vector<Arena> arenas_;
  std::mutex retired_mutex_;
  std::vector<RetiredBlock> retired_;  // of retire(); their functions may read peers' memory
  mutable std::mutex interruption_mutex_;
  std::shared_ptr<const WaitInterruption> interruption_;
};

}  // namespace shoal::shm
