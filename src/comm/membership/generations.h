#pragma once
// Generations of an elastic job: the world is made anew, of those that live, each time a rank has ended or comes.

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "comm/membership/board.h"
#include "comm/membership/join_table.h"
#include "comm/membership/membership.h"
#include "comm/membership/memory_store.h"
#include "comm/membership/patience.h"
#include "shoal/error.h"
#include "shoal/world.h"

namespace shoal {

struct GroupProgress;
struct WorldState;

// Runs Membership with the board, and gives the copies of a World its new content. Not thread-safe: for the thread that
// trains.
class Generations {
 public:
  // From now on, waits in the world's groups end at once when a rank has ended, and stopped ranks are waited for. The
  // world and its ranks are the first generation. UsageError where ranks of a host do not share memory.
  //
  // In a newcomer: asks the job to join. It has no generation until recover() returns, and asks no more from its
  // destructor on.
  //
  // stragglers: when ranks that do not come to a recovery are killed. silence: after which a host of which nothing is
  // heard is left out, if the ranks of the others are more than half of all. With several hosts, collective.
  explicit Generations(const World& world, StragglerRule stragglers = {},
                       std::chrono::milliseconds silence = std::chrono::seconds(10));
  // This rank takes no more part. One without the job's state is left out by the others.
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
  bool has_several_hosts() const { return board_->has_several_hosts(); }
  // With several hosts: whether decision `number` of this generation has passed, as the first rank says that asks, for
  // all of them. Numbered from 1, and asked in turn until one has failed. JobLost if the store is lost.
  bool decide(int64_t number, bool passes);

  // The table of the job's processes; nullptr: nobody can join.
  JoinTable* joins() const { return joins_.get(); }
  // Whether this process does not have the job's state yet.
  bool is_newcomer() const;
  // Whether the present generation has ranks without the job's state.
  bool has_newcomers() const { return !newcomers_of(members()).empty(); }
  // Between two steps: begins a generation with the processes that ask to join. False: none does, and nothing has
  // changed. True: recover() must follow. Refused are processes that cannot be reached, more than there may be ranks,
  // and, if there is a reason, those of other hosts than the first member's. changed: how the job differs from what
  // they have compared themselves with; all are refused for it. Collective over the members.
  bool admit(int most_ranks, const std::string& why_one_host = "", const std::string& changed = "");
  // All ranks of the present generation have the job's state. on_trial: those that have not completed a step with the
  // others yet, equal on all that have.
  void complete(MemberList on_trial = {});
  // They have.
  void end_trial() { trial_.clear(); }
  bool has_trial() const { return !trial_.empty(); }
  bool is_on_trial() const;
  // How long others wait for one that is on trial, or a newcomer, to show that it has seen a change of the ranks.
  void set_patience(std::chrono::milliseconds patience) { patience_ = patience; }
  // From now on.
  void set_straggler_limit(std::chrono::milliseconds limit);
  // Members of the present generation that have come to the job.
  MemberList have_come() const;
  // After a failure that no rank's end explains: leaves newcomers and those on trial out of the next generation. True
  // also if a rank has ended. False: another generation would not help, because there are none, or this is one.
  bool drop_newcomers(const std::string& why);
  // Leaves these out of the next generation.
  void drop(const MemberList& newcomers, const std::string& why) { refuse(newcomers, why); }
  // This process takes no part from now on, and the others go on at once.
  void resign();

  // Gives up all groups of the world, agrees with the others that live on who goes on, and makes their world. Begins
  // again if one of them ends meanwhile. Afterwards no process that lives uses memory of the former groups. JobLost if
  // fewer than `min_ranks` are left, or if one that lives does not come within the world's timeout. Collective over
  // those that live.
  //
  // In a newcomer: waits for members to admit it, for the world's timeout. UsageError if they refuse it, or have ended.
  void recover(int min_ranks);

 private:
  void go_on(int min_ranks);
  void give_up(WorldState& world);
  void free_former(const MemberCard& card);
  MemberCard agree(int min_ranks);
  void require_enough(int ranks, int min_ranks) const;
  void end_left_out(const MemberCard& card) const;
  bool waits_in_vain(const std::map<int, MemberSight>& sights, Membership::Outcome outcome) const;
  [[noreturn]] void lose_late(const MemberCard& card, Membership::Outcome outcome) const;
  void require_not_given_up() const;
  void make_world(const MemberCard& card);
  std::map<int, MemberSight> look();
  void learn_of_newcomers();
  bool names_a_stranger(const std::map<int, MemberSight>& sights) const;
  bool explained_by_a_death() const;
  void announce_job();
  MemberList newcomers_of(const MemberList& members) const;
  // Newcomers and members on trial, to which failures are put down.
  MemberList suspects_of(const MemberList& members) const;
  void refuse(const MemberList& newcomers, const std::string& why);
  void drop_late(const MemberCard& card);
  void end_stragglers(const MemberCard& card, Patience& patience) const;
  void require_job() const;
  void require_not_refused() const;
  void wait_for_the_first() const;
  void make_store(WorldState& world, const MemberCard& card);
  bool is_on_this_host(int member) const;
  void require_board() const;
  void show(const MemberCard& card);
  c10::intrusive_ptr<MemoryStore> open_store(int maker, uint64_t number, std::chrono::seconds limit) const;

  // Withdraws a newcomer's knock if the constructor fails.
  struct Knock {
    explicit Knock(const WorldState& state);
    ~Knock();
    Knock(const Knock&) = delete;
    Knock& operator=(const Knock&) = delete;
    std::shared_ptr<JoinTable> table{};
    std::optional<int> number{};  // nothing: this is no newcomer, or a member by now
  };

  std::shared_ptr<WorldCell> cell_;
  std::shared_ptr<JoinTable> joins_;
  std::vector<Peer> peers_;  // by member
  std::shared_ptr<Board> board_;
  Knock knock_;
  std::shared_ptr<GenerationWatch> watch_;  // of the present generation
  StorePtr job_store_;                      // for the generations of a job that newcomers from other hosts may join
  Membership membership_;
  MemberList complete_;    // members that have had the job's state
  MemberList trial_;       // those of them that have not completed a step
  std::set<int> dropped_;  // newcomers that are left out
  std::chrono::milliseconds patience_{10'000};
  StragglerRule stragglers_;
  uint64_t changes_ = 0;                                // of the table, that peers_ has
  std::vector<std::shared_ptr<GroupProgress>> former_;  // groups that were given up
};

}  // namespace shoal
