#pragma once
// Control block of a group: a block of shared memory through which its ranks coordinate. Operations announce themselves
// here, count arrived and finished ranks, and report errors. Written by the users of this file only.
//
//   ControlBlock | UseFlag by rank | Entry 0 .. ring-1, each with one Header per rank
//                | Mailbox source * size + destination
//
// Counters only grow; they are compared with the value that the operation in question brings them to.

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "comm/agreement/fingerprint.h"

namespace shoal::shm {

constexpr size_t cache_line = 128;  // two lines, because the hardware fetches them in pairs
constexpr uint32_t ring_entries = 32;
constexpr uint32_t mailbox_slots = 16;
constexpr size_t inline_bytes = 512;  // operations up to this size store their data in the header

// Place of a rank's data.
struct Window {
  enum Kind : uint32_t { nothing, in_header, staged, shared };
  Kind kind = nothing;
  uint32_t arena = 0;  // for `shared`: place of the tensor
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

struct Header {
  std::atomic<uint64_t> announced;  // last operation that this rank announced here, from 1
  Fingerprint print;
  double factor;  // of a premultiplied sum
  uint32_t parts;
  uint32_t stage_arena;  // this rank's staging buffer, for staged windows
  uint64_t stage_offset;
  alignas(cache_line) std::byte data[inline_bytes];
  // Window[size], one per part; then uint64_t[size]: the bytes that this rank expects from each rank, if parts differ
  // in size.
};

struct Entry {
  alignas(cache_line) std::atomic<uint64_t> posted;    // grows by `size` per use of the entry
  alignas(cache_line) std::atomic<uint64_t> finished;  // grows by `size` per use of the entry
};

// Whether a rank uses other ranks' tensors now.
struct UseFlag {
  alignas(cache_line) std::atomic<uint32_t> in_place;
};

struct ControlBlock {
  std::atomic<uint32_t> readers;  // number of ranks that may still read other ranks' buffers
  std::atomic<uint32_t> users;    // number of ranks that still need this block
  std::atomic<uint32_t> opened;   // number of ranks that have mapped this block
  // First reason why the group is unusable: the two lines below are valid from `disagreed` on.
  enum Fault : uint32_t { none, being_written, disagreed, abandoned };
  std::atomic<uint32_t> fault;
  int32_t culprit;  // world rank; -1: unknown
  char fault_text[1000];
  alignas(cache_line) std::atomic<uint64_t> stage_filled;    // grows by `size` per staged round
  alignas(cache_line) std::atomic<uint64_t> stage_finished;  // grows by `size` per staged round
};

// Slot for a message, or a piece of one, between two ranks.
struct Slot {
  std::atomic<uint32_t> state;  // 0: free, 1: full
  int32_t tag;
  int32_t dtype;
  Window window;
  uint64_t order;  // number of the piece among all pieces of this mailbox
  uint64_t total;  // size of the whole message
  uint64_t begin;  // offset of the piece in the message
  char text[text_bytes];
  alignas(cache_line) std::byte data[inline_bytes];
};

struct Mailbox {
  Slot slots[mailbox_slots];
};

// Addresses inside the block of a group of `size` ranks.
class ControlLayout {
 public:
  ControlLayout(std::byte* base, int size) : base_(base), size_(size) {}

  static size_t bytes(int size) {
    return before_entries(size) + ring_entries * entry_bytes(size) + sizeof(Mailbox) * static_cast<size_t>(size) * size;
  }

  ControlBlock& block() const { return *reinterpret_cast<ControlBlock*>(base_); }
  UseFlag& use(int rank) const { return reinterpret_cast<UseFlag*>(base_ + round_up(sizeof(ControlBlock)))[rank]; }
  Entry& entry(uint64_t number) const { return *reinterpret_cast<Entry*>(entry_at(number)); }
  Header& header(uint64_t number, int rank) const {
    return *reinterpret_cast<Header*>(entry_at(number) + round_up(sizeof(Entry)) + rank * header_bytes(size_));
  }
  Window* windows(Header& header) const {
    return reinterpret_cast<Window*>(reinterpret_cast<std::byte*>(&header) + sizeof(Header));
  }
  uint64_t* expected(Header& header) const { return reinterpret_cast<uint64_t*>(windows(header) + size_); }
  Mailbox& mailbox(int source, int destination) const {
    auto* first = base_ + before_entries(size_) + ring_entries * entry_bytes(size_);
    return reinterpret_cast<Mailbox*>(first)[source * size_ + destination];
  }

 private:
  static size_t round_up(size_t bytes) { return (bytes + cache_line - 1) / cache_line * cache_line; }
  static size_t before_entries(int size) {
    return round_up(sizeof(ControlBlock)) + sizeof(UseFlag) * static_cast<size_t>(size);
  }
  static size_t header_bytes(int size) {
    return round_up(sizeof(Header) + (sizeof(Window) + sizeof(uint64_t)) * static_cast<size_t>(size));
  }
  static size_t entry_bytes(int size) {
    return round_up(sizeof(Entry)) + header_bytes(size) * static_cast<size_t>(size);
  }
  std::byte* entry_at(uint64_t number) const {
    return base_ + before_entries(size_) + (number % ring_entries) * entry_bytes(size_);
  }

  std::byte* base_;
  int size_;
};

// Whether a counter that grows by `size` per round has completed `rounds` rounds.
inline bool reached(const std::atomic<uint64_t>& counter, uint64_t rounds, int size) {
  return counter.load(std::memory_order_acquire) >= rounds * static_cast<uint64_t>(size);
}

// Use of other ranks' tensors by a rank. One that gives the group up sets the fault, and then waits until nobody uses
// them: either it sees this object, or goes_on() sees the fault.
class UseInPlace {
 public:
  UseInPlace(const ControlLayout& control, int rank) : control_(control), rank_(rank) {
    control_.use(rank_).in_place.store(1);
  }
  ~UseInPlace() { control_.use(rank_).in_place.store(0); }
  UseInPlace(const UseInPlace&) = delete;
  UseInPlace& operator=(const UseInPlace&) = delete;
  bool goes_on() const { return control_.block().fault.load() == ControlBlock::none; }

 private:
  const ControlLayout& control_;
  const int rank_;
};

}  // namespace shoal::shm
