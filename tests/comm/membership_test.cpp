// Membership, tried in every order of events: members read each other's cards one by one, die, stop and join at any
// moment in between. Each case says how many: at most three members or two and a newcomer, two deaths, one stop, one
// split of the network.
//
// Not covered: more of them. While a network is split only the lists are checked, not that somebody goes on. Once it
// has healed, somebody goes on if nobody has died; a member that left others out in vain may have no majority for ever.

#include "comm/membership/membership.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace shoal {
namespace {

using Outcome = Membership::Outcome;
using Sights = std::map<int, MemberSight>;

struct Events {
  int founders = 3;
  int newcomers = 0;
  int deaths = 0;
  int stops = 0;     // a stopped member takes no steps until it is continued
  int admits = 0;    // times that newcomers may be admitted
  int renewals = 0;  // times that a member begins another generation because its communication has failed
  int splits = 0;    // the network splits: members on two sides cannot see each other any more
  int heals = 0;     // and is whole again
};

struct Process {
  explicit Process(Membership made) : membership(std::move(made)), shown(membership.card()) {}

  Membership membership;
  MemberCard shown;  // what others can read; written at once, some time after it was decided
  Sights read{};     // what it has read of the others so far, in order
  bool dead = false;
  bool stopped = false;
  MemberCard agreed{};  // the last generation that it went on with
};

struct State {
  std::vector<Process> processes;
  Events left;
  MemberList apart{};                            // one side of a network that has split
  std::map<uint64_t, MemberList> generations{};  // all that any process has gone on with
};

// All states that can be reached; `faults` are sentences about those that must not be.
class Exploration {
 public:
  explicit Exploration(const Events& events)
      : founders_(events.founders), splits_(events.splits > 0), dies_(events.deaths > 0) {
    State first{{}, events};
    MemberCard card;
    for (int member = 0; member < events.founders; ++member) card.members.push_back(member);
    for (int member = 0; member < events.founders; ++member) {
      first.processes.emplace_back(Membership(member, card));
      first.processes.back().agreed = card;
    }
    for (int newcomer = 0; newcomer < events.newcomers; ++newcomer) {
      first.processes.emplace_back(Membership(events.founders + newcomer));
    }
    add(first);
    while (!open_.empty() && faults.size() < 5) {
      const auto state = std::move(open_.back());
      open_.pop_back();
      visit(state);
    }
  }

  size_t states() const { return seen_.size(); }
  size_t ends = 0;  // states in which nothing happens any more
  std::vector<std::string> faults;

 private:
  static int size(const State& state) { return static_cast<int>(state.processes.size()); }

  static std::string text(const MemberCard& card) {
    std::string all = std::to_string(card.number) + "/" + std::to_string(card.grown) + ":";
    for (const int member : card.members) all += std::to_string(member);
    if (!card.base.empty()) all += "<";
    for (const int member : card.base) all += std::to_string(member);
    return all;
  }

  static std::string text(const State& state) {
    std::string all = std::to_string(state.left.deaths) + std::to_string(state.left.stops) +
                      std::to_string(state.left.admits) + std::to_string(state.left.renewals) +
                      std::to_string(state.left.splits) + std::to_string(state.left.heals) + " apart";
    for (const int member : state.apart) all += std::to_string(member);
    all += "\n";
    for (const auto& process : state.processes) {
      all += process.dead ? "dead " : process.stopped ? "stopped " : "";
      all += text(process.shown) +
             (process.shown == process.membership.card() ? "" : ">" + text(process.membership.card()));
      all += " base ";
      for (const int member : process.membership.base()) all += std::to_string(member);
      all += " grown ";
      for (const int member : process.membership.grown()) all += std::to_string(member);
      all += " agreed " + text(process.agreed);
      for (const auto& [other, sight] : process.read) {
        all += " sees " + std::to_string(other) + "=" + std::to_string(static_cast<int>(sight.state)) +
               (sight.card ? text(*sight.card) : "");
      }
      all += "\n";
    }
    for (const auto& [number, members] : state.generations) all += text({.number = number, .members = members}) + " ";
    return all;
  }

  void add(const State& state) {
    if (seen_.insert(text(state)).second) open_.push_back(state);
  }

  void require(bool holds, const std::string& what, const State& state) {
    if (!holds) faults.push_back(what + "\n" + text(state));
  }

  void visit(const State& state) {
    for (int self = 0; self < size(state); ++self) {
      const auto& process = state.processes[self];
      if (process.dead) continue;
      if (state.left.deaths > 0) {
        auto next = state;
        --next.left.deaths;
        next.processes[self].dead = true;
        next.processes[self].read.clear();
        add(next);
      }
      if (process.stopped || state.left.stops > 0) {
        auto next = state;
        next.processes[self].stopped = !process.stopped;
        if (!process.stopped) --next.left.stops;
        add(next);
      }
      if (process.stopped) continue;
      if (!(process.shown == process.membership.card())) {
        auto next = state;
        next.processes[self].shown = process.membership.card();
        add(next);
        continue;
      }
      read_next(state, self);
    }
    if (state.left.splits > 0) split(state);
    if (state.left.heals > 0 && !state.apart.empty()) heal(state);
    if (state.apart.empty()) check(state);
  }

  void split(const State& state) {
    for (int first = 0; first < size(state); ++first) {
      for (int second = first; second < size(state); ++second) {
        auto next = state;
        --next.left.splits;
        next.apart = {first};
        if (second != first) next.apart.push_back(second);
        add(next);
      }
    }
  }

  void heal(State state) {
    --state.left.heals;
    state.apart.clear();
    add(state);
  }

  static bool is_apart(const State& state, int member) {
    return std::find(state.apart.begin(), state.apart.end(), member) != state.apart.end();
  }

  // The next other process in order; after the last one, the member makes up its mind.
  void read_next(const State& state, int self) {
    const auto& process = state.processes[self];
    int other = process.read.empty() ? 0 : process.read.rbegin()->first + 1;
    if (other == self) ++other;
    if (other >= size(state)) {
      decide(state, self, /*renew=*/false);
      if (state.left.renewals > 0 && !process.agreed.members.empty()) decide(state, self, /*renew=*/true);
      return;
    }
    if (is_apart(state, self) != is_apart(state, other)) {
      auto next = state;
      next.processes[self].read[other] = {MemberSight::State::silent, std::nullopt};
      add(next);
      return;
    }
    const auto& seen = state.processes[other];
    const auto sight = [&](MemberSight::State as) {
      auto next = state;
      next.processes[self].read[other] = {as, seen.shown};
      add(next);
    };
    sight(MemberSight::State::present);  // also of a process that has just died
    if (seen.dead) sight(MemberSight::State::gone);
    if (seen.stopped && !seen.dead) sight(MemberSight::State::silent);
  }

  void decide(const State& state, int self, bool renew) {
    auto next = state;
    auto& process = next.processes[self];
    const auto sights = std::exchange(process.read, {});
    if (renew && !process.membership.card().members.empty()) {
      --next.left.renewals;
      process.membership.renew(sights);
    }
    const auto outcome = process.membership.look(sights);
    if (outcome == Outcome::agreed) {
      process.agreed = process.membership.card();
      const auto [place, made] = next.generations.emplace(process.agreed.number, process.agreed.members);
      require(made || place->second == process.agreed.members, "one number, two generations", next);
      check_split(next, self);
      admit(next, self, sights);
    }
    add(next);
  }

  // A generation works while all its members live and go on with it: without a dead one, its collectives fail. Two that
  // work must have a common member: apart, they would be two jobs.
  void check_split(const State& state, int self) {
    const auto& own = state.processes[self].agreed;
    if (!works(state, own)) return;
    for (const auto& process : state.processes) {
      const auto& other = process.agreed;
      if (process.dead || process.membership.card().members.empty() || !works(state, other)) continue;
      const bool meet = std::any_of(own.members.begin(), own.members.end(), [&](int member) {
        return std::find(other.members.begin(), other.members.end(), member) != other.members.end();
      });
      require(meet, "two generations without a common member", state);
    }
  }

  static bool works(const State& state, const MemberCard& generation) {
    return !generation.members.empty() &&
           std::all_of(generation.members.begin(), generation.members.end(), [&](int member) {
             const auto& process = state.processes[member];
             return !process.dead && process.agreed.number == generation.number;
           });
  }

  void admit(const State& state, int self, const Sights& sights) {
    const auto& card = state.processes[self].membership.card();
    if (state.left.admits == 0 || card.members.front() != self) return;
    MemberList asking;
    for (const auto& [other, sight] : sights) {
      if (sight.state == MemberSight::State::present && sight.card->members.empty()) asking.push_back(other);
    }
    if (asking.empty()) return;
    auto next = state;
    --next.left.admits;
    next.processes[self].membership.admit(asking, sights);
    add(next);
  }

  // If no process would change anything once all see what is true, all that live have agreed. Cards only grow, so the
  // states would go on without end if members could keep each other busy for ever.
  void check(const State& state) {
    MemberList living;
    bool any_member = false;  // a process that was in a generation once
    // Of two founders one had begun to go on without the other, and has died: the job may be lost, or that of
    // newcomers. Of three, somebody always goes on.
    bool any_lost = false;
    MemberList stuck;
    for (int self = 0; self < size(state); ++self) {
      const auto& process = state.processes[self];
      if (process.dead) continue;
      if (process.stopped || !process.read.empty() || !(process.shown == process.membership.card())) return;
      auto membership = process.membership;
      const auto outcome = membership.look(truth_for(state, self));
      if (!(membership.card() == process.membership.card())) return;
      if (outcome == Outcome::agreed && !(process.agreed == membership.card())) return;
      any_lost = any_lost || (founders_ == 2 && was_left_by_the_dead(state, self));
      if (outcome == Outcome::no_majority) {
        stuck.push_back(self);
        continue;
      }
      if (!process.shown.members.empty()) living.push_back(self);
      any_member = any_member || !process.agreed.members.empty();
    }
    ++ends;
    require(stuck.empty() || any_lost || splits_, "a member has no majority", state);
    require(!living.empty() || !any_member || any_lost || (splits_ && dies_), "nobody goes on", state);
    for (const int self : living) {
      const auto& process = state.processes[self];
      require(process.agreed.members == living, "a member waits for ever", state);
      require(process.agreed == process.shown, "a member goes on with another card than it shows", state);
    }
  }

  // Whether a member of its generation had begun to go on without it, or others had gone on, and have died since.
  static bool was_left_by_the_dead(const State& state, int self) {
    const auto& own = state.processes[self].agreed;
    const auto lacks = [self](const MemberList& list) {
      return std::find(list.begin(), list.end(), self) == list.end();
    };
    const auto dead = [&](int member) { return state.processes[member].dead; };
    const bool begun = std::any_of(own.members.begin(), own.members.end(), [&](int member) {
      const auto& shown = state.processes[member].shown;
      return dead(member) && shown.number > own.number && lacks(shown.members);
    });
    return begun || std::any_of(state.generations.begin(), state.generations.end(), [&](const auto& generation) {
             const auto& [number, members] = generation;
             return number > own.number && lacks(members) && std::all_of(members.begin(), members.end(), dead);
           });
  }

  static Sights truth_for(const State& state, int self) {
    Sights sights;
    for (int other = 0; other < size(state); ++other) {
      if (other == self) continue;
      const auto& process = state.processes[other];
      sights[other] = {process.dead ? MemberSight::State::gone : MemberSight::State::present, process.shown};
    }
    return sights;
  }

  int founders_;
  bool splits_;
  bool dies_;
  std::unordered_set<std::string> seen_;
  std::vector<State> open_;
};

void explore(const Events& events) {
  const Exploration exploration(events);
  for (const auto& fault : exploration.faults) ADD_FAILURE() << fault;
  std::printf("%zu states, %zu ends\n", exploration.states(), exploration.ends);
  EXPECT_GT(exploration.ends, 1U);
}

TEST(Membership, ELA01_two_of_three_may_die_at_any_moment) {
  explore({.founders = 3, .deaths = 2});
}
TEST(Membership, ELA01_one_of_two_may_die_at_any_moment) {
  explore({.founders = 2, .deaths = 1});
}
TEST(Membership, ELA01_members_begin_another_generation_and_one_dies) {
  explore({.founders = 3, .deaths = 1, .renewals = 1});
}
TEST(Membership, ELA06_a_process_joins_two_and_two_of_them_die) {
  explore({.founders = 2, .newcomers = 1, .deaths = 2, .admits = 2});
}
TEST(Membership, ELA08_a_member_stops_and_goes_on) {
  explore({.founders = 3, .stops = 1});
}
TEST(Membership, ELA08_a_member_stops_and_another_dies) {
  explore({.founders = 3, .deaths = 1, .stops = 1});
}
TEST(Membership, ELA10_the_network_splits_and_heals) {
  explore({.founders = 3, .splits = 1, .heals = 1});
}
TEST(Membership, ELA10_the_network_splits_and_heals_and_a_member_dies) {
  explore({.founders = 3, .deaths = 1, .splits = 1, .heals = 1});
}
TEST(Membership, ELA08_a_member_that_was_left_out_joins_again) {
  explore({.founders = 3, .stops = 1, .admits = 1});
}
TEST(Membership, ELA08_a_member_stops_while_a_process_joins) {
  explore({.founders = 2, .newcomers = 1, .stops = 1, .admits = 1});
}
TEST(Membership, ELA08_a_member_stops_and_another_dies_while_a_process_joins) {
  explore({.founders = 2, .newcomers = 1, .deaths = 1, .stops = 1, .admits = 1});
}
TEST(Membership, ELA10_the_network_splits_and_a_member_dies_while_a_process_joins) {
  explore({.founders = 2, .newcomers = 1, .deaths = 1, .admits = 1, .splits = 1});
}
TEST(Membership, ELA10_the_network_splits_and_heals_while_a_process_joins) {
  explore({.founders = 2, .newcomers = 1, .admits = 1, .splits = 1, .heals = 1});
}

}  // namespace
}  // namespace shoal
