#pragma once
// Board of an elastic job: what its members show each other, and who of them has ended.

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/membership/board_entry.h"
#include "comm/membership/peer_exit.h"
#include "comm/membership/store_board.h"
#include "comm/rendezvous/rendezvous.h"
#include "comm/shm/host_memory.h"

namespace shoal {

// Lies in the pages of the members' own processes, which all others of the host map, so that it outlives all of them:
// no server, and no member whose death would matter. With several hosts it lies in the job's store as well, whose loss
// is that of the job. Thread-safe, but show(), serve() and leave() are for one thread.
class Board {
 public:
  static constexpr int most_members = most_board_members;

  // members: the processes by number of member. between_hosts: for members on several hosts, collective over them;
  // nothing: all are on this one. UsageError if the memory of one of this host cannot be opened.
  Board(std::shared_ptr<shm::HostMemory> memory, int self, const std::vector<Peer>& members,
        std::optional<StoreBoardOptions> between_hosts);
  // The same members and others, whose numbers may have gaps. A process of this host that cannot be opened, because it
  // has ended or shows nothing, counts as gone. former: this process's board so far; nullptr: it is a newcomer, of a
  // job on several hosts with `between_hosts`.
  Board(std::shared_ptr<shm::HostMemory> memory, int self, const std::vector<Peer>& members, const Board* former,
        std::optional<StoreBoardOptions> between_hosts = std::nullopt);

  int self() const { return self_; }
  // These wake the other members. CommError if the store is lost.
  void show(const MemberCard& card);
  void serve(uint64_t generation, int descriptor, uint64_t nonce);
  void lose(int living);
  void give_up();
  // With several hosts: see StoreBoard::decide().
  bool decide(uint64_t generation, int64_t number, bool passes) {
    return elsewhere_->decide(generation, number, passes);
  }
  // This member takes no more part in recoveries. It may end at any time without having failed.
  void leave() noexcept;

  BoardEntry entry(int member) const;
  // Whether a member has begun a generation after this one.
  bool is_beyond(int member, uint64_t generation) const;
  // The most members that any member knew to live when it found them too few; 0: none has.
  int lost_with() const;
  // Whether a member has ended before it had done with the job.
  bool failed(int member) const;
  bool gone(int member) const;
  bool has_several_hosts() const { return elsewhere_ != nullptr; }
  // Whether nothing is heard of the host of a member that takes part.
  bool silent(int member) const;
  // Whether the job is lost, and why; empty: it is not.
  bool is_lost() const { return elsewhere_ && elsewhere_->is_lost(); }
  std::string lost() const;
  // Whether a process has come under the number, and what it shows can be read.
  bool knows(int member) const;
  // Kills another member, as PeerExit does; on another host, its launcher is asked to. For the thread that trains.
  bool end(int member) const;
  const ProcessId& process(int member) const { return members_[static_cast<size_t>(member)].process; }
  // Returns the memory of a member that has ended to the system, except for what it shows.
  void unmap(int member);
  // Of all members but this one.
  std::map<int, MemberSight> look() const;

  // Waits until a member has shown something new or ended since `seen`, or for 100 ms.
  uint32_t bell() const { return memory_->bell(); }
  void wait(uint32_t seen) const;

 private:
  void publish();
  void watch_exits();
  std::vector<std::string> hosts() const;
  std::function<bool(int member)> ended() const;
  bool is_on_this_host(int member) const;
  bool is_in_store(int member) const;

  std::shared_ptr<shm::HostMemory> memory_;
  int self_;
  std::vector<Peer> members_;
  std::vector<std::shared_ptr<shm::PeerMemory>> pages_;               // by member; nullptr for this one
  std::shared_ptr<BoardEntry> own_ = std::make_shared<BoardEntry>();  // shared with the boards before and after
  std::shared_ptr<PeerExit> exits_;
  std::shared_ptr<StoreBoard>
      elsewhere_;  // nullptr: all members are on this host; shared with the boards before and after
};

// When ranks that live and do nothing are killed.
struct StragglerRule {
  std::chrono::milliseconds limit{};  // how long the others wait for one; 0: they do not kill
  int min_ranks = 1;                  // nor where fewer would be left
};

// Whether a generation still holds: none of its members has ended or given it up, and the job is not lost. Thread-safe.
class GenerationWatch : public shm::WaitInterruption {
 public:
  GenerationWatch(std::shared_ptr<Board> board, uint64_t number, MemberList members, StragglerRule stragglers = {})
      : board_(std::move(board)), number_(number), members_(std::move(members)), stragglers_(stragglers) {}

  bool raised() const noexcept override { return board_->is_lost() || broken_by() >= 0; }
  // The rank at fault; -1: none.
  int broken_by() const noexcept;
  // "rank 1 (pid 41) is gone: ...; between steps, ..."; for a generation that no longer holds.
  std::string why() const;
  // Whether a rank's process has ended: proven by the kernel, and for good.
  bool ended(int rank) const noexcept { return board_->gone(members_[static_cast<size_t>(rank)]); }
  // Whether a rank has begun a later generation, and so has given up this one.
  bool left_behind(int rank) const noexcept { return board_->is_beyond(members_[static_cast<size_t>(rank)], number_); }
  uint64_t number() const { return number_; }
  const MemberList& members() const { return members_; }
  // These are for the thread that trains.
  const StragglerRule& stragglers() const { return stragglers_; }
  void set_straggler_limit(std::chrono::milliseconds limit) { stragglers_.limit = limit; }
  // Kills a member that is late, and says so.
  void end(int member) const;
  // For a rank that ends with JobLost because members that live do not come: these find it when they do, and the
  // launchers, which would wait for them. why: the sentence of JobLost.
  void give_up(const std::string& why) const;

 private:
  std::string broken_in_words(int rank) const;

  std::shared_ptr<Board> board_;
  uint64_t number_;
  MemberList members_;
  StragglerRule stragglers_;
  mutable std::atomic<int> silent_ = -1;  // a rank whose host was silent, also if it is heard of again
};

}  // namespace shoal
