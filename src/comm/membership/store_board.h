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
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "comm/membership/board_entry.h"
#include "comm/membership/patience.h"
#include "comm/membership/patient_store.h"
#include "comm/membership/store_table.h"

namespace shoal {

struct StoreBoardOptions {
  // Of a host of which nothing is heard for the store's time of silence, all members are silent.
  std::shared_ptr<PatientStore> store{};
  std::string prefix{};            // of the keys; no other job has it, and no other meeting of this one
  std::string generation{};        // of the launcher's keys (ended_key)
  std::chrono::seconds timeout{};  // for all members to come
  std::shared_ptr<StoreTable>
      table{};         // of processes that may join, which the thread keeps up to date; nullptr: none may
  bool joins = false;  // this process does, and waits for nobody here
};

// A thread writes to the store every second, or five times in the time of silence, that this member lives, and whom of
// its host's members the kernel reports as ended; and reads what the others write. Thread-safe, but show() and grow()
// are for one thread.
class StoreBoard {
 public:
  // hosts: by member; empty: no process has come under this number. ended: whether the process of a member of this host
  // has ended, with proof. noticed: called by the thread when something has changed. Collective over the members:
  // CommError after the timeout.
  StoreBoard(StoreBoardOptions options, int self, const std::vector<std::string>& hosts,
             std::function<bool(int member)> ended, std::function<void()> noticed);
  ~StoreBoard();
  StoreBoard(const StoreBoard&) = delete;
  StoreBoard& operator=(const StoreBoard&) = delete;

  // Takes in processes that have come since, each of which shows an entry by now.
  void grow(const std::vector<std::string>& hosts, std::function<bool(int member)> ended);

  // Whether the member is on another host.
  bool has(int member) const {
    const auto* seen = find(member);
    return seen != nullptr && seen->is_elsewhere;
  }

  // Once it returns, the other hosts can see the entry. CommError if the store is lost.
  void show(const shm::Notice::Words& words);
  // Whether decision `number` of a generation, which are numbered from 1, has passed: as the first of all members says
  // that asks, for all of them. To be asked in turn, until one has failed. CommError if the store is lost. For the
  // thread that shows.
  bool decide(uint64_t generation, int64_t number, bool passes);
  // Asks the launcher of its host to kill a member. Whether it is asked for the first time. CommError if the store is
  // lost. For the thread that shows.
  bool end(int member);
  // Nothing is written or read from now on. For the thread that shows.
  void stop();

  // What a member on another host, or one that is gone, has shown last.
  shm::Notice::Words words(int member) const;
  uint64_t number(int member) const {
    const auto* seen = find(member);
    return seen != nullptr ? seen->number.load() : 0;
  }
  bool left(int member) const {
    const auto* seen = find(member);
    return seen != nullptr && seen->left;
  }
  // Proven by the kernel of its host, as a member or the launcher there says, or by this one's; also where no process
  // has come.
  bool gone(int member) const {
    const auto* seen = find(member);
    return seen == nullptr || seen->gone;
  }
  bool silent(int member) const {
    const auto* seen = find(member);
    return seen != nullptr && seen->silent;
  }
  // Of one moment, in which all members of a host are silent or none is.
  std::vector<bool> silent_members() const;

  bool is_lost() const { return options_.store->is_lost(); }
  // Why the store is lost; empty: it is not.
  std::string why_lost() const { return options_.store->why_lost(); }

 private:
  struct Seen {
    Seen(std::string of, bool elsewhere) : host(std::move(of)), is_elsewhere(elsewhere) {}
    const std::string host;
    const bool is_elsewhere;
    std::atomic<uint64_t> number = 0;
    std::atomic<bool> left = false, gone = false, silent = false;
    uint64_t changes = 0;  // of the entry that was read last; these are for the thread
    std::string beat{};
    std::chrono::steady_clock::time_point moved{};  // when the beat was another one
    shm::Notice::Words words{};
  };
  // An entry in the store.
  struct Read {
    shm::Notice::Words words{};
    std::array<uint64_t, most_board_members / 64> ended{};  // members of its host, as bits
    bool tells_of(int member) const { return (ended[static_cast<size_t>(member) / 64] >> (member % 64) & 1) != 0; }
  };

  const Seen* find(int member) const {
    const bool possible = member >= 0 && member < most_board_members;
    return possible ? seen_[static_cast<size_t>(member)].load() : nullptr;
  }
  Seen& at(int member) { return *seen_[static_cast<size_t>(member)].load(); }
  void add(const std::vector<std::string>& hosts);
  void learn_others();
  std::vector<int> of_this_host() const;
  std::chrono::milliseconds beat_every() const;
  std::chrono::milliseconds interval() const;
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
  void await_all();
  std::string key(const char* what, int member) const;

  const StoreBoardOptions options_;
  const int self_;
  const std::string host_;
  const std::function<void()> noticed_;
  std::vector<int> others_;                // members on other hosts; for the thread, as is what follows
  std::vector<std::string> polled_;        // their beats, and the table's changes
  std::map<std::string, Patience> heard_;  // by host
  Patience reached_;                       // the store

  // What this member shows.
  struct Own {
    std::mutex mutex;  // guards the others
    Read entry{};
    bool unwritten = false;
    uint64_t beats = 0;
    uint64_t changes = 0;
  } own_;

  std::set<int> overdue_;  // members that launchers were asked to kill

  // By member; nullptr: no process has come. They stay as long as this object.
  std::array<std::atomic<Seen*>, most_board_members> seen_{};
  std::atomic<int> used_ = 0;  // numbers of members so far

  mutable std::mutex mutex_;  // guards the words in seen_, and what follows
  std::vector<std::unique_ptr<Seen>> kept_;
  std::function<bool(int)> ended_;
  std::condition_variable changed_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace shoal
