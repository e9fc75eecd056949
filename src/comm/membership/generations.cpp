#include "comm/membership/generations.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <iterator>
#include <set>
#include <thread>

#include "comm/group/group_state.h"
#include "comm/membership/first_generation.h"
#include "comm/rendezvous/world_state.h"
#include "shoal/detail/clock.h"
#include "shoal/error.h"

namespace shoal {
namespace {

constexpr const char* loopback = "127.0.0.1";
constexpr int most_attempts = 5;  // to connect the same ranks

}  // namespace

Generations::Generations(const World& world, StragglerRule stragglers, std::chrono::milliseconds silence)
    : cell_(fresh_cell(world)),
      joins_(table_of(*cell_->state)),
      peers_(first_peers(*cell_->state)),
      board_(first_board(*cell_, peers_, joins_, silence)),
      knock_(*cell_->state),
      membership_(first_membership(*cell_->state)),
      stragglers_(stragglers) {
  auto& state = *cell_->state;
  if (state.options.rejoin) throw UsageError("Elastic: a rank that rejoins cannot train with DistributedDataParallel");
  const auto& card = membership_.card();
  complete_ = card.members;
  if (!knock_.number) {
    state.liveness->wait_for_stopped();
    announce_job();
    board_->show(card);
  }
  watch_ = std::make_shared<GenerationWatch>(board_, card.number, card.members, stragglers_);
  state.watch = watch_;
  state.memory->interrupt_by(watch_);
}

Generations::~Generations() {
  if (cell_->state->is_forked_copy()) {
    new std::shared_ptr<Board>(board_);  // its thread is the parent's, and cannot be joined here
    return;
  }
  const bool fails = is_on_trial() && std::uncaught_exceptions() > 0;
  try {
    is_newcomer() || fails ? resign() : board_->leave();
  } catch (const CommError&) {  // NOLINT(bugprone-empty-catch): of a lost store, which ends the job for the others, too
  }
}

bool Generations::mends(const CommError& error) const {
  return broken() || dynamic_cast<const GroupEnded*>(&error) == nullptr;
}

void Generations::recover(int min_ranks) {
  try {
    go_on(min_ranks);
  } catch (const CommError&) {
    require_board();
    throw;
  }
}

void Generations::go_on(int min_ranks) {
  give_up(*cell_->state);
  MemberList tried;
  for (int attempt = 1;; ++attempt) {
    const auto card = agree(min_ranks);
    end_left_out(card);
    free_former(card);
    if (std::exchange(tried, card.members) != card.members) attempt = 1;
    try {
      make_world(card);
      return;
    } catch (const std::exception& error) {
      // Gloo throws errors of libtorch.
      const bool connection =
          dynamic_cast<const CommError*>(&error) != nullptr || dynamic_cast<const c10::Error*>(&error) != nullptr;
      const bool with_newcomers = !is_newcomer() && has_newcomers();
      if (!connection && !watch_->raised() && !with_newcomers) throw;
      give_up(*cell_->state);
      if (watch_->raised()) continue;
      // A newcomer that all others cannot connect with twice is left out.
      if (with_newcomers && attempt > 1 &&
          drop_newcomers(fmt::format("the ranks could not connect with it: {}", error.what())))
        continue;
      if (attempt < most_attempts) {
        if (has_several_hosts()) std::this_thread::sleep_for(std::chrono::milliseconds(500));  // the store may be slow
        continue;
      }
      throw JobLost(fmt::format("the {} ranks that are left could not connect in {} attempts: {}", card.members.size(),
                                attempt, error.what()));
    }
  }
}

// Whoever shows this card has given up its groups, and so does not use the memory of any other rank.
void Generations::free_former(const MemberCard& card) {
  auto& memory = *cell_->state->memory;
  for (const auto& group : former_) group->transport->given_up_by_all();
  former_.clear();
  memory.free_retired();
  std::vector<shm::PageAddress> pages;
  for (const int member : card.members) {
    if (is_on_this_host(member)) pages.push_back(peers_[static_cast<size_t>(member)].page);
  }
  memory.keep_peers(pages);
  for (int member = 0; member < static_cast<int>(peers_.size()); ++member) {
    if (!std::binary_search(card.members.begin(), card.members.end(), member)) board_->unmap(member);
  }
}

bool Generations::is_on_this_host(int member) const {
  return peers_[static_cast<size_t>(member)].host == peers_[static_cast<size_t>(self())].host;
}

void Generations::give_up(WorldState& world) {
  for (const auto& group : world.groups.living()) {
    const auto why = fmt::format(
        "a group ended with generation {} of this elastic job; take world.group() again (in Python the default "
        "process group, or a dist.new_group() of this generation)",
        number());
    if (!group->ended.set(why)) continue;  // before, by admit()
    group->failure.set(why);
    group->transport->give_up(why);
    former_.push_back(group);
  }
}

MemberCard Generations::agree(int min_ranks) {
  const auto limit = std::chrono::seconds(cell_->state->options.timeout_seconds);
  Patience waiting(limit, std::chrono::seconds(1));
  const auto patience = Clock::now() + patience_;
  Patience with_stragglers(stragglers_.limit);
  // Nobody has begun another generation: this rank does, because its communication has failed.
  const bool begun = membership_.card().members.empty() || membership_.card().number > number();
  if (!begun && !watch_->raised()) membership_.renew(look());
  while (true) {
    require_board();
    const auto seen = board_->bell();
    const auto before = membership_.card();
    const auto sights = look();
    const auto outcome = membership_.look(sights);
    const auto& card = membership_.card();
    require_not_given_up();
    if (is_newcomer()) require_job();
    require_not_refused();
    if (outcome == Membership::Outcome::left_out) {
      if (!is_newcomer()) {
        throw JobLost("the other ranks of this elastic job go on without this one, which they take for dead");
      }
      // Whoever was admitting it ended before the others had read its card, so it asks again.
      show(card);
      waiting.restart();
    }
    if (card.members.empty()) {
      if (waiting.over()) {
        throw UsageError(
            fmt::format("no rank of the job has admitted this newcomer within {} s: ranks admit between two "
                        "calls of Elastic::step()",
                        limit.count()));
      }
    } else {
      require_enough(static_cast<int>(card.members.size()), min_ranks);
      if (!(board_->entry(board_->self()).card == card)) show(card);
      if (outcome == Membership::Outcome::agreed) {
        if (card.number > number()) return card;
        membership_.renew(look());  // a host that was silent is heard of again
        continue;
      }
      // Without a majority this rank waits as well: it has only not noticed yet which members have ended.
      if (Clock::now() > patience) drop_late(card);
      if (stragglers_.limit.count() > 0 && !(before == card)) {  // all have to answer anew
        with_stragglers.restart();
        waiting.restart();
      }
      end_stragglers(card, with_stragglers);
      if (waiting.over() || waits_in_vain(sights, outcome)) lose_late(card, outcome);
    }
    if (before == card) board_->wait(seen);
    if (cell_->state->options.while_waiting) cell_->state->options.while_waiting();
  }
}

void Generations::require_board() const {
  if (board_->is_lost()) throw JobLost(board_->lost() + "; start the job again from its last checkpoint");
}

void Generations::show(const MemberCard& card) {
  try {
    board_->show(card);
  } catch (const CommError&) {
    require_board();
    throw;
  }
}

bool Generations::decide(int64_t number, bool passes) {
  try {
    return board_->decide(this->number(), number, passes);
  } catch (const CommError&) {
    require_board();
    throw;
  }
}

// Members that have found the job lost end, one after the other: the first one's count is the cause, and all name it.
void Generations::require_enough(int ranks, int min_ranks) const {
  if (ranks >= min_ranks) return;
  try {
    board_->lose(std::max(ranks, board_->lost_with()));
  } catch (const CommError&) {  // NOLINT(bugprone-empty-catch): of a lost store; the job is lost in any case
  }
  throw JobLost(
      fmt::format("{} of {} ranks are left, and this elastic job needs min_ranks = {}: start it again from its last "
                  "checkpoint",
                  board_->lost_with(), peers_.size(), min_ranks));
}

void Generations::set_straggler_limit(std::chrono::milliseconds limit) {
  stragglers_.limit = limit;
  watch_->set_straggler_limit(limit);
}

// Not newcomers and those on trial, which are dropped instead.
void Generations::end_stragglers(const MemberCard& card, Patience& patience) const {
  if (is_newcomer() || is_on_trial() || !patience.over()) return;
  const auto suspects = suspects_of(card.members);
  MemberList present, late;
  int answered = 0;
  for (const int member : card.members) {
    const auto entry = board_->entry(member);
    if (board_->gone(member) || entry.left) continue;
    const bool is_late = member != self() && entry.card.number < card.number;
    answered += is_late ? 0 : 1;
    if (!std::binary_search(suspects.begin(), suspects.end(), member)) (is_late ? late : present).push_back(member);
  }
  if (answered < stragglers_.min_ranks) return;
  const auto place = std::find(present.begin(), present.end(), self()) - present.begin();
  const auto turn = turn_to_kill(static_cast<size_t>(place));
  if (!patience.over(turn)) return;
  // On another host, members may wait in an update for one of them, which they kill first.
  const bool longer = patience.over(turn + stragglers_.limit);
  for (const int member : late) {
    if (longer || is_on_this_host(member)) watch_->end(member);
  }
}

// Of a silent host. Whoever stands still there would find that the job goes on without it only when it is continued.
void Generations::end_left_out(const MemberCard& card) const {
  if (stragglers_.limit.count() == 0) return;
  for (const int member : members()) {
    const bool left_out = !std::binary_search(card.members.begin(), card.members.end(), member);
    if (left_out && board_->silent(member) && !board_->gone(member)) watch_->end(member);
  }
}

// Asked behind look(): what a member that it has seen gone has shown last is what it shows.
void Generations::require_not_given_up() const {
  for (const int member : members()) {
    if (member == self() || !board_->entry(member).gave_up) continue;
    throw JobLost(
        fmt::format("rank {} (pid {}) of the first generation has waited in vain for others, and has given the job up: "
                    "start it again from its last checkpoint",
                    member, board_->process(member).pid));
  }
}

// Without a majority, because of members that had gone on without this one before they ended: whoever they have
// admitted may be at work. All others have ended, or wait as this one does.
bool Generations::waits_in_vain(const std::map<int, MemberSight>& sights, Membership::Outcome outcome) const {
  if (outcome != Membership::Outcome::no_majority || is_newcomer()) return false;
  const auto& card = membership_.card();
  const auto is_settled = [&](int member) {
    if (member == self()) return true;
    const auto found = sights.find(member);
    if (found == sights.end()) return false;
    const auto& [state, shown] = found->second;
    return state == MemberSight::State::gone || (state == MemberSight::State::present && shown && *shown == card);
  };
  const auto all_are = [&](const MemberList& list) { return std::all_of(list.begin(), list.end(), is_settled); };
  return all_are(membership_.base()) && all_are(membership_.grown()) && all_are(card.members);
}

// Those without a majority do not give the job up, because others may go on with it; nor do those without its state.
void Generations::lose_late(const MemberCard& card, Membership::Outcome outcome) const {
  std::vector<std::string> late;
  std::vector<int> silent;
  // Some hosts may have fallen silent before others, and be off the card.
  const auto& all = members();
  std::copy_if(all.begin(), all.end(), std::back_inserter(silent),
               [&](int member) { return board_->silent(member) && !board_->gone(member); });
  for (const int member : card.members) {
    if (member == self() || board_->silent(member) || board_->entry(member).card == card) continue;
    late.push_back(fmt::format("{} (pid {})", member, board_->process(member).pid));
  }
  if (!silent.empty()) {
    throw JobLost(fmt::format(
        "nothing is heard of the hosts of rank(s) {} of the first generation{}, and the other ranks are not more than "
        "half of all: ranks that are cut off might go on without them",
        fmt::join(silent, ", "),
        late.empty() ? "" : fmt::format(", rank(s) {} have not come to the recovery", fmt::join(late, ", "))));
  }
  if (late.empty()) {
    std::set<int> left_out(all.begin(), all.end());
    left_out.insert(membership_.grown().begin(), membership_.grown().end());
    std::erase_if(left_out,
                  [&](int member) { return std::binary_search(card.members.begin(), card.members.end(), member); });
    throw JobLost(fmt::format(
        "rank(s) {} of the first generation, of which nothing was heard for a time, have ended or do not answer, and "
        "may have gone on without this one: the other ranks are not more than half of all",
        fmt::join(left_out, ", ")));
  }
  const auto lost = fmt::format(
      "rank(s) {} of the first generation live, but have not come to the recovery within {} s: they are "
      "stopped, or compute without communicating",
      fmt::join(late, ", "), cell_->state->options.timeout_seconds);
  if (outcome == Membership::Outcome::waiting && !is_newcomer() && !is_on_trial()) watch_->give_up(lost);
  throw JobLost(lost);
}

void Generations::make_world(const MemberCard& card) {
  auto& former = *cell_->state;
  const bool several_hosts = board_->has_several_hosts();
  auto state = std::make_shared<WorldState>();
  state->options = former.options;
  state->join = former.join;
  state->placement = former.placement;
  state->memory = former.memory;
  state->listen_address = several_hosts ? former.listen_address : loopback;
  watch_ = std::make_shared<GenerationWatch>(board_, card.number, card.members, stragglers_);
  state->watch = watch_;
  state->memory->interrupt_by(watch_);
  auto& placement = state->placement;
  placement.rank = static_cast<int>(std::find(card.members.begin(), card.members.end(), self()) - card.members.begin());
  placement.size = static_cast<int>(card.members.size());
  if (!several_hosts) {
    placement.address = loopback;
    placement.store_is_served = true;
  }
  auto& meeting = state->meeting;
  meeting.prefix = fmt::format("shoal/{}/generation/{}", placement.generation, card.number);
  meeting.failure_key = meeting.prefix + "/first_failure";
  for (const int member : card.members) meeting.peers.push_back(peers_[static_cast<size_t>(member)]);
  // From here on recover() gives up the new world if it fails.
  auto former_cell = std::exchange(*cell_, {state, cell_->group});
  if (several_hosts) {
    meeting.store = former_cell.state->meeting.store;
    if (state->join.over_hosts) {  // where newcomers look, too: a program's store may see a part of the keys
      if (!job_store_) job_store_ = connect_to_job(placement, state->options.rendezvous_timeout_seconds);
      meeting.store = job_store_;
    }
    meeting.server = std::move(former_cell.state->meeting.server);
  } else if (placement.size > 1) {
    make_store(*state, card);
  }
  state->liveness =
      std::make_unique<Liveness>(meeting, placement, state->memory, state->options.stopped_timeout_seconds);
  // A newcomer that is stopped is not waited for; see complete().
  if (newcomers_of(card.members).empty()) state->liveness->wait_for_stopped();
  count_local_ranks(*state);
  cell_->group = make_world_group(state);
}

// A store of its own for each generation, in memory that the lowest member makes: whoever made the former one may have
// ended, and keys of a generation that failed must not be taken for this one's. With several hosts the job's store
// serves all generations; the prefix tells them apart.
void Generations::make_store(WorldState& world, const MemberCard& card) {
  auto& meeting = world.meeting;
  const int maker = card.members.front();
  c10::intrusive_ptr<MemoryStore> store;
  if (maker == self()) {
    store = c10::make_intrusive<MemoryStore>();
    board_->serve(card.number, store->descriptor(), store->nonce());
  } else {
    store = open_store(maker, card.number, std::chrono::seconds(world.options.rendezvous_timeout_seconds));
  }
  meeting.store = c10::make_intrusive<DeadlineStore>(store, "shared memory", store_limit);
}

c10::intrusive_ptr<MemoryStore> Generations::open_store(int maker, uint64_t number, std::chrono::seconds limit) const {
  const auto deadline = Clock::now() + limit;
  while (true) {
    const auto seen = board_->bell();
    const auto entry = board_->entry(maker);
    if (watch_->raised()) throw CommError(watch_->why());
    if (entry.store_of == number) {
      return c10::make_intrusive<MemoryStore>(board_->process(maker).pid, entry.store_descriptor, entry.store_nonce);
    }
    if (Clock::now() > deadline) {
      throw CommError(fmt::format("rank 0 of generation {} has made no store after {} s", number, limit.count()));
    }
    board_->wait(seen);
  }
}

}  // namespace shoal
