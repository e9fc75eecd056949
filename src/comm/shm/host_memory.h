#pragma once
// Memory that a process shares with its peers on the host: a page with its doorbell and the table of its arenas, and
// the arenas, from which shared buffers are allocated.

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

#include "comm/shm/memory_file.h"

namespace shoal {

// The least that a process takes from the system at once; it costs what is used of it.
inline constexpr size_t arena_bytes = size_t{256} << 20;

// A place in one process's arenas, meaningful to all processes of the host.
struct SharedPlace {
  uint32_t arena = 0;
  uint64_t offset = 0;
};

// The first page of a process's shared memory; mapped by all its peers.
struct ProcessPage {
  static constexpr uint32_t max_arenas = 200;
  struct Arena {
    int32_t descriptor;
    uint64_t bytes;
  };
  uint64_t nonce;                     // proves that a peer has opened the right memory
  std::atomic<uint32_t> bell;         // counts events that concern this process
  std::atomic<uint32_t> sleepers;     // threads that wait for the bell in the kernel
  std::atomic<uint32_t> arena_count;  // entries of `arenas` that are valid
  std::atomic<int32_t> blamed;        // the world rank because of which this one has failed, plus one; 0: none yet
  Arena arenas[max_arenas];
};

// How to reach a process's page; exchanged at the rendezvous.
struct PageAddress {
  int pid = 0;
  int descriptor = -1;
  uint64_t nonce = 0;
};

// The memory of one peer as seen from here. Thread-safe.
class PeerMemory {
 public:
  // Throws std::runtime_error when the peer's memory cannot be reached.
  explicit PeerMemory(const PageAddress& address);

  std::byte* at(const SharedPlace& place);
  // Tells the peer that something it may be waiting for has happened.
  void ring() const;
  // Whom it has blamed; -1: nobody. Can be read after its death.
  int blamed() const;

 private:
  int pid_;
  MemoryFile page_file_;
  ProcessPage* page_;
  std::mutex mutex_;
  std::vector<MemoryFile> arenas_;
};

// Something that can go on when a peer has done its part; see HostMemory::poll.
class Pollable {
 public:
  virtual ~Pollable() = default;
  virtual void poll() noexcept = 0;
};

// This process's own shared memory, and its way to that of its peers. Thread-safe.
class HostMemory {
 public:
  HostMemory();
  ~HostMemory();

  PageAddress address() const;

  // Tells all peers, also later ones, which world rank this process's failure comes from. The first call counts.
  void blame(int world_rank);

  // A peer's memory, opened once and kept. Throws std::runtime_error when it cannot be reached.
  std::shared_ptr<PeerMemory> peer(const PageAddress& address);

  // A rank that waits for one group must go on with the operations of all others, since a peer may wait for those
  // first.
  void attach(Pollable& pollable);
  void detach(Pollable& pollable);
  void poll();

  // `bytes` zeroes, aligned to a page. Throws std::bad_alloc's message as UsageError when the system has none left.
  std::byte* allocate(size_t bytes);
  // Returns the memory to the system at once. No peer may use it any more.
  void free(std::byte* data);
  // For memory that peers may still read: `bury` is tried now, and again whenever memory is allocated or freed, until
  // it returns true.
  void retire(std::function<bool()> bury);
  // Where [data, data + bytes) lies, if it is inside one block of this heap.
  std::optional<SharedPlace> locate(const void* data, size_t bytes) const;
  std::byte* at(const SharedPlace& place) const;

  // Value to pass to sleep(); read it before the condition is checked for the last time.
  uint32_t bell() const;
  // Announces a sleeper; from here on every ring() costs its sender a system call.
  void prepare_sleep();
  void cancel_sleep();
  // Blocks until the bell has rung since `seen`, or the timeout. Ends what prepare_sleep began.
  void sleep(uint32_t seen, std::chrono::nanoseconds timeout);

  size_t bytes_in_use() const;

 private:
  struct Arena {
    MemoryFile file;
    std::map<size_t, size_t> free;  // offset -> bytes
    std::map<size_t, size_t> used;
  };
  std::byte* allocate_in(Arena& arena, size_t bytes);
  void try_graves();

  const int pid_;  // a forked child has another one
  MemoryFile page_file_;
  ProcessPage* page_;
  std::shared_mutex poll_mutex_;
  std::vector<Pollable*> pollables_;
  mutable std::mutex mutex_;
  std::map<uint64_t, std::shared_ptr<PeerMemory>> peers_;  // by nonce: numbers of processes come back
  std::vector<Arena> arenas_;
  std::mutex graves_mutex_;
  std::vector<std::function<bool()>> graves_;  // may look into peers' memory
};

}  // namespace shoal
