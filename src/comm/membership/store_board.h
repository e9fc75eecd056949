#pragma once
// Board between the hosts of an elastic job: what members show those on other hosts, through the job's store.

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/membership/board_entry.h"
#include "comm/membership/patience.h"
#include "comm/store/store.h"

namespace shoal {

struct StoreBoardOptions {
  StorePtr store{};        // a connection that nobody else uses
  std::string prefix;      // of the keys; no other job has it, and no other meeting of this one
  std::string generation;  // of the launcher's keys (ended_key)
  // Of a host of which nothing is heard for so long, all members are silent. The store is lost after the same time.
  std::chrono::milliseconds silence;
  std::chrono::seconds timeout;  // for all members to come
};

// A thread writes to the store every second, or five times in the time of silence, that this member lives, and whom of its
// host's members the kernel reports as ended; and reads what the others write. A store that cannot be reached is lost for
// good: members that it separates must not each go on by themselves. Thread-safe, but show() is for one thread.
class StoreBoard {
 public:
  // hosts: by member. ended: whether the process of a member of this host has ended, with proof. noticed: called by the
  // thread when something has changed. Collective over the members: CommError after the timeout.
  StoreBoard(StoreBoardOptions options, int self, std::vector<std::string> hosts, std::function<bool(int member)> ended,
             std::function<void()> noticed);
  ~StoreBoard();
  StoreBoard(const StoreBoard&) = delete;
  StoreBoard& operator=(const StoreBoard&) = delete;

  // Whether the member is on another host.
  bool has(int member) const { return hosts_[static_cast<size_t>(member)] != hosts_[static_cast<size_t>(self_)]; }

  // Once it returns, the other hosts can see the entry. CommError if the store is lost.
  void show(const Notice::Words& words);
  // Whether decision `number` of a generation, which are numbered from 1, has passed: as the first of all members says that asks,
  // for all of them. To be asked in turn, until one has failed. CommError if the store is lost. For the thread that shows.
  bool decide(uint64_t generation, int64_t number, bool passes);
  // Nothing is written or read from now on. For the thread that shows.
  void stop();

  // What a member on another host, or one that is gone, has shown last.
  Notice::Words words(int member) const;
  uint64_t number(int member) const { return seen_[static_cast<size_t>(member)].number; }
  bool left(int member) const { return seen_[static_cast<size_t>(member)].left; }
  // Proven by the kernel of its host, as a member or the launcher there says, or by this one's.
  bool gone(int member) const { return seen_[static_cast<size_t>(member)].gone; }
  bool silent(int member) const { return seen_[static_cast<size_t>(member)].silent; }
  // Of one moment, in which all members of a host are silent or none is.
  std::vector<bool> silent_members() const;
  const std::string& host(int member) const { return hosts_[static_cast<size_t>(member)]; }

  bool is_lost() const { return lost_; }
  // Why the store is lost; empty: it is not.
  std::string why_lost() const;

 private:
  struct Seen {
    std::atomic<uint64_t> number = 0;
    std::atomic<bool> left = false, gone = false, silent = false;
    uint64_t changes = 0;  // of the entry that was read last
    std::string beat{};
    std::chrono::steady_clock::time_point moved{};  // when the beat was another one
    Notice::Words words{};
  };
  // An entry in the store.
  struct Read {
    Notice::Words words{};
    std::array<uint64_t, most_board_members / 64> ended{};  // members of its host, as bits
    bool tells_of(int member) const { return (ended[static_cast<size_t>(member) / 64] >> (member % 64) & 1) != 0; }
  };

  std::chrono::milliseconds beat_every() const;
  void run();
  bool tell();
  bool hear();
  bool ask_launchers();
  bool has_ended(int member) const;
  Read read(int member) const;
  Read read_last(int member) const;
  static Read parsed(const std::string& text, int member);
  void take(int member, const Read& entry, bool ended);
  bool look_for_silence();
  void write();
  // Calls `act`, which uses the store, until it has an answer. CommError if the store is lost.
  template <class Act>
  auto ask(const Act& act);
  void await_all();
  void lose(const std::string& why);
  std::string key(const char* what, int member) const;

  const StoreBoardOptions options_;
  const int self_;
  const std::vector<std::string> hosts_;
  const std::function<bool(int)> ended_;
  const std::function<void()> noticed_;
  std::vector<int> others_;  // members on other hosts
  std::vector<std::string> beats_of_others_;

  std::mutex write_mutex_;  // guards what this member shows
  Read own_{};
  bool unwritten_ = false;
  uint64_t beats_ = 0;
  uint64_t changes_ = 0;

  mutable std::mutex mutex_;  // guards the words of seen_, why_lost_ and stop_
  std::vector<Seen> seen_;    // by member
  std::string why_lost_;
  std::atomic<bool> lost_ = false;
  std::map<std::string, Patience> heard_;  // by host; for the thread
  Patience reached_;                       // the store; for the thread

  std::condition_variable changed_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace shoal
