#pragma once
// A new process takes a dead rank's place in gossip that goes on. It and the members, those who are there, tell each
// other through the job's store, in this order:
//
//   newcomer  "who"      its rank, and its process; whoever sets it first has the number
//   members   "ack/R"    version, address of the channel, members
//   newcomer  "donor"    the member that shall give it its state, for which these two make a group
//   newcomer  "here"     the address of its channel
//   members   "ready/R"  version; its channel is known
//   newcomer  "from"     the version from which on all count it in, and which it shows
//   members   "in/R"     they do, from the version on that they show next; then the newcomer trains
//
// Newcomers of a group have numbers, and come one after another.

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/gossip/channel.h"
#include "shoal/group.h"

namespace shoal {

// Whether this process has taken a dead rank's place, and has not met the group.
bool joins_again(const Group& group);
// The group of these ranks after newcomer `number`, for whom Group::subgroup's names are not known. Collective over
// them.
Group group_after(const Group& group, int number, const std::vector<int>& ranks);

// A member's side. Called between steps, by the thread that communicates.
class Admission {
 public:
  // `last`: the newcomer that has been counted in last; 0: none.
  explicit Admission(Group group, int last = 0) : group_(std::move(group)), number_(last + 1) {}

  struct Counted {
    int rank = 0;
    int number = 0;  // the newcomer's
  };
  using HandOver = std::function<void(const Group& pair)>;  // gives this rank's state to rank 1 of the pair

  // Looks for news: once in a while when a member is missing, at every call while somebody joins. `version`: shown
  // last. The result is counted in from the version that is shown next. Nothing here fails: a newcomer that ends is
  // forgotten, and a store that is gone or does not answer is not asked again.
  std::optional<Counted> look(int64_t version, const std::vector<int>& members, GossipChannel& channel,
                              const HandOver& hand_over);

 private:
  std::optional<std::string> read(const std::string& key);
  void write(const std::string& key, const std::string& text);
  bool meet(int64_t version, const std::vector<int>& members, const GossipChannel& channel);
  bool has_ended() const;
  void next();

  using Time = std::chrono::steady_clock::time_point;
  Group group_;
  int number_;     // of the newcomer that is here, or will come next
  int rank_ = -1;  // its rank; -1: nobody is here
  bool donor_known_ = false;
  bool admitted_ = false;
  bool blind_ = false;  // the store is gone
  Time looked_{};
  Time deadline_{};
};

// The newcomer's side. Everything throws CommError that names the ranks that have not answered in time.
class Newcomer {
 public:
  explicit Newcomer(const Group& group);

  // Tells the members that this rank is here and waits for their answers. The group of two with the member that gives
  // its state, the first of `preferred` that is there; its rank is 0, this one's 1.
  Group meet_donor(const std::vector<int>& preferred);
  // Of all ranks; empty: the rank is gone.
  const std::vector<std::string>& addresses() const { return addresses_; }
  // This rank among them.
  std::vector<int> members() const;
  int number() const { return number_; }
  // Tells the members where this rank's channel is; the version that it shows first, together with them.
  int64_t arrive(const std::string& address);
  // Until all of them count it in: one that trained before would mix with ranks that do not mix with it.
  void settle();

 private:
  enum class Until { all, any };
  // By rank, of those asked for; empty where one is seen to be gone.
  std::vector<std::string> answers(const std::string& kind, const std::vector<int>& from, Until until = Until::all);

  Group group_;
  int number_ = 0;
  std::vector<std::string> addresses_;
  std::vector<int64_t> versions_;  // of the members when they answered first
  std::chrono::steady_clock::time_point answered_{};
};

}  // namespace shoal
