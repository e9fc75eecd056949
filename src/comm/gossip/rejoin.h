#pragma once
// Rejoining: a new process takes a dead rank's place while gossip continues. The newcomer and the members (the ranks
// that are present) exchange these entries in the job's store, in this order:
//
//   newcomer  "who"      its rank and process; the first process to set it has the number
//   members   "ack/R"    version, address of the channel, members
//   newcomer  "donor"    the member that is to give it its state; the two then make a group
//   newcomer  "here"     the address of its channel
//   members   "ready/R"  version; the member knows the newcomer's channel
//   newcomer  "from"     the version from which on all members include it, and which it shows first
//   members   "in/R"     the member includes the newcomer; once all do, the newcomer trains
//
// Newcomers of a group are numbered, and join one after another.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/gossip/channel.h"
#include "shoal/detail/clock.h"
#include "shoal/group.h"

namespace shoal {

// Whether this process has taken a dead rank's place and has not met the group.
bool joins_again(const Group& group);
// The group of these ranks after newcomer `number`, for whom the names of Group::subgroup are unknown. Collective over
// these ranks.
Group group_after(const Group& group, int number, const std::vector<int>& ranks);

// Member's side. Called between steps, by the thread that communicates.
class GossipAdmission {
 public:
  // last: number of the last newcomer that was included; 0: none.
  explicit GossipAdmission(Group group, int last = 0) : group_(std::move(group)), number_(last + 1) {}

  struct Counted {
    int rank = 0;
    int number = 0;  // number of the newcomer
  };
  using HandOver = std::function<void(const Group& pair)>;  // gives this rank's state to rank 1 of the pair

  // Looks for news: now and then while a member is missing, at every call while a newcomer joins. version: the last one
  // shown. The returned newcomer is included from the next version on. Never fails: a newcomer that ends is forgotten,
  // and a store that is gone or does not answer is not asked again.
  std::optional<Counted> look(int64_t version, const std::vector<int>& members, GossipChannel& channel,
                              const HandOver& hand_over);

 private:
  std::optional<std::string> read(const std::string& key);
  // Nothing also if the value is no number.
  template <class Number>
  std::optional<Number> read_number(const std::string& key);
  void write(const std::string& key, const std::string& text);
  bool meet(int64_t version, const std::vector<int>& members, const GossipChannel& channel);
  bool has_ended() const;
  void next();

  Group group_;
  int number_;     // number of the present or next newcomer
  int rank_ = -1;  // rank of the newcomer; -1: none is present
  bool donor_known_ = false;
  bool admitted_ = false;
  bool blind_ = false;  // the store is gone
  Clock::time_point looked_{};
  Clock::time_point deadline_{};
};

// Newcomer's side. All functions throw a CommError that names the ranks that have not answered in time.
class Newcomer {
 public:
  explicit Newcomer(const Group& group);

  // Tells the members that this rank is here, and waits for their answers. Returns the group of two with the member
  // that gives its state, the first of `preferred` that is present; the member is rank 0, this process rank 1.
  Group meet_donor(const std::vector<int>& preferred);
  // Addresses of all ranks; empty if the rank is gone.
  const std::vector<std::string>& addresses() const { return addresses_; }
  // Includes this rank.
  std::vector<int> members() const;
  int number() const { return number_; }
  // Tells the members the address of this rank's channel; returns the version that it shows first, together with them.
  int64_t arrive(const std::string& address);
  // Waits until all members include this rank: if it trained earlier, it would mix with ranks that do not mix with it.
  void settle();

 private:
  enum class Until { all, any };
  // Answers by rank, of the ranks in `from`; empty for a rank that is seen to be gone.
  std::vector<std::string> answers(const std::string& kind, const std::vector<int>& from, Until until = Until::all);

  Group group_;
  int number_ = 0;
  std::vector<std::string> addresses_;
  std::vector<int64_t> versions_;  // the members' versions in their first answers
  Clock::time_point answered_{};
};

}  // namespace shoal
