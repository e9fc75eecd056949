#pragma once
// Membership of an elastic job: which processes make up its next generation. A state machine without clock, memory or
// network, so that a test can try every order of events (docs/adr/0021).
//
// Every member shows a card: a number and a list of members. A member that knows of a death shows a higher number and a
// shorter list. The list is the next generation once all members on it show the same card. No rank decides for others,
// so no rank's death can leave a decision half made.

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

namespace shoal {

// Ascending numbers of members. A process keeps its number as long as it lives, and no other process gets it.
using MemberList = std::vector<int>;

struct MemberCard {
  uint64_t number = 0;  // only grows; two cards of one member with one number have the same list
  uint64_t grown = 0;   // number with which the list became longer the last time
  MemberList members{};
  MemberList base{};  // the generation that the members of that time had agreed on before it became longer
  bool operator==(const MemberCard&) const = default;
};

// What a member sees of another.
struct MemberSight {
  enum class State {
    present,
    silent,  // stopped, or without an answer for too long; it may go on any time
    gone,    // proven: the kernel of its host says that the process has ended
  };
  State state = State::present;
  std::optional<MemberCard> card{};  // the last one that could be read
};

class Membership {
 public:
  enum class Outcome {
    waiting,      // for cards of other members; look again when something changes
    agreed,       // all members on the card show it: the card is a generation
    left_out,     // the others go on without this process; from now on it asks to join
    no_majority,  // too many members are silent to go on without them, or have ended after they had left this one out;
                  // also for a moment where another member knows of deaths that this one has not noticed yet
  };

  // A member of the first generation.
  Membership(int self, MemberCard first);
  // A process that asks to join: it shows an empty card until a member's card names it.
  explicit Membership(int self) : Membership(self, {}) {}

  // The card to show. Whoever reads it must see either all of it or the one before.
  const MemberCard& card() const { return card_; }
  // Members of the last generation that this process knows to be agreed.
  const MemberList& base() const { return base_; }
  // The list of the last admission; equal to base() once a generation is agreed. Another member may have seen it agreed
  // before this one does, so going on without silent members takes a majority of both lists.
  const MemberList& grown() const { return grown_; }
  // Takes note of what the other processes show, by member; may change the card.
  Outcome look(const std::map<int, MemberSight>& others);
  // Begins another generation, of the same members unless some have ended: the present one was given up. `look`
  // follows.
  void renew(const std::map<int, MemberSight>& others);
  // Adds processes that ask to join. Only for the first member of a generation that is agreed, between two steps.
  void admit(const MemberList& newcomers, const std::map<int, MemberSight>& others);

 private:
  bool has_majority(const MemberList& members, const std::map<int, MemberSight>& others) const;
  void adopt(const MemberCard& grown);
  Outcome join(const std::map<int, MemberSight>& others);

  int self_;
  MemberCard card_;
  MemberList base_;
  MemberList grown_;
};

}  // namespace shoal
