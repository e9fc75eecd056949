#pragma once
// Board of an elastic job on one host: what its members show each other in shared memory, and who of them has ended.

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/membership/membership.h"
#include "comm/membership/peer_exit.h"
#include "comm/rendezvous/rendezvous.h"
#include "comm/shm/host_memory.h"

namespace shoal {

// What a member shows: its card, the store that it has made for a generation, and whether it has done with the job.
struct BoardEntry {
  MemberCard card{};
  uint64_t store_of = 0;     // number of the generation; 0: none
  int store_descriptor = 0;  // of its memory, in the member's process
  uint64_t store_nonce = 0;
  bool left = false;
  int lost_with = 0;  // members that it knew to live when it found them too few to go on; 0: it has not
};

// Lies in the pages of the members' own processes, which all others map, so that it outlives all of them: no server, and
// no member whose death would matter. Thread-safe, but show(), serve() and leave() are for one thread.
class Board {
 public:
  static constexpr int most_members = 1024;

  // members: the processes by number of member. UsageError if one of them runs on another host or its memory cannot be
  // opened. rung: called on some thread when a member has ended.
  Board(std::shared_ptr<HostMemory> memory, int self, const std::vector<Peer>& members);
  // The same members and others, whose numbers may have gaps. A process that cannot be opened, because it has ended or
  // shows nothing, counts as gone. former: this process's board so far; nullptr: it is a newcomer.
  Board(std::shared_ptr<HostMemory> memory, int self, const std::vector<Peer>& members, const Board* former);

  int self() const { return self_; }
  // These wake the other members.
  void show(const MemberCard& card);
  void serve(uint64_t generation, int descriptor, uint64_t nonce);
  void lose(int living);
  // This member takes no more part in recoveries. It may end at any time without having failed.
  void leave();

  BoardEntry entry(int member) const;
  // Whether a member has begun a generation after this one.
  bool is_beyond(int member, uint64_t generation) const;
  // The most members that any member knew to live when it found them too few; 0: none has.
  int lost_with() const;
  // Whether a member has ended before it had done with the job.
  bool failed(int member) const;
  bool gone(int member) const {
    return exits_->gone(static_cast<size_t>(member)) || (member != self_ && !pages_[static_cast<size_t>(member)]);
  }
  bool knows(int member) const {
    return member == self_ || (static_cast<size_t>(member) < pages_.size() && pages_[static_cast<size_t>(member)]);
  }
  // Kills another member, as PeerExit does. For the thread that trains.
  bool end(int member) const { return exits_->end(static_cast<size_t>(member)); }
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

  std::shared_ptr<HostMemory> memory_;
  int self_;
  std::vector<Peer> members_;
  std::vector<std::shared_ptr<PeerMemory>> pages_;  // by member; nullptr for this one
  BoardEntry own_;
  std::unique_ptr<PeerExit> exits_;
};

// When ranks that live and do nothing are killed.
struct StragglerRule {
  std::chrono::milliseconds limit{};  // how long the others wait for one; 0: they do not kill
  int min_ranks = 1;                  // nor where fewer would be left
};

// Whether a generation still holds: none of its members has ended or given it up. Thread-safe.
class GenerationWatch : public Interruption {
 public:
  GenerationWatch(std::shared_ptr<const Board> board, uint64_t number, MemberList members,
                  StragglerRule stragglers = {})
      : board_(std::move(board)), number_(number), members_(std::move(members)), stragglers_(stragglers) {}

  bool raised() const noexcept override { return broken_by() >= 0; }
  // The rank at fault; -1: none.
  int broken_by() const noexcept;
  // "rank 1 (pid 41) is gone: ..."; for a generation that no longer holds.
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

 private:
  std::shared_ptr<const Board> board_;
  uint64_t number_;
  MemberList members_;
  StragglerRule stragglers_;
};

}  // namespace shoal
