#pragma once
// Generations of an elastic job: the world is made anew, of those that live, each time a rank has ended.

#include <memory>
#include <string>

#include "comm/membership/board.h"
#include "comm/membership/membership.h"
#include "shoal/error.h"
#include "shoal/world.h"

namespace shoal {

struct GroupProgress;

// Runs Membership with the board, and gives the copies of a World its new content. Not thread-safe: for the thread that
// trains.
class Generations {
 public:
  // From now on, waits in the world's groups end at once when a rank has ended, and stopped ranks are waited for. The
  // world and its ranks are the first generation. UsageError where ranks do not share memory.
  explicit Generations(const World& world);
  // This rank takes no more part.
  ~Generations();
  Generations(const Generations&) = delete;
  Generations& operator=(const Generations&) = delete;

  // Whether the present generation has lost a rank, or one has given it up.
  bool broken() const { return watch_->raised(); }
  // Whether a recovery can help against this error; not against the use of a group of a former generation.
  bool mends(const CommError& error) const;
  uint64_t number() const { return watch_->number(); }
  // Members of the present generation, by rank: their ranks in the first one.
  const MemberList& members() const { return watch_->members(); }
  int self() const { return board_->self(); }

  // Gives up all groups of the world, agrees with the others that live on who goes on, and makes their world. Begins
  // again if one of them ends meanwhile. Afterwards no process that lives uses memory of the former groups. JobLost if
  // fewer than `min_ranks` are left, or if one that lives does not come within the world's timeout. Collective over
  // those that live.
  void recover(int min_ranks);

 private:
  void give_up(WorldState& world);
  void free_former(const MemberCard& card);
  MemberCard agree(int min_ranks);
  void require_enough(int ranks, int min_ranks) const;
  [[noreturn]] void lose_late(const MemberCard& card) const;
  void make_world(const MemberCard& card);
  void connect_store(WorldState& world, const MemberCard& card);

  std::shared_ptr<WorldCell> cell_;
  std::vector<Peer> peers_;  // by member
  std::shared_ptr<Board> board_;
  std::shared_ptr<GenerationWatch> watch_;  // of the present generation
  Membership membership_;
  std::vector<std::shared_ptr<GroupProgress>> former_;  // groups that were given up
};

}  // namespace shoal
