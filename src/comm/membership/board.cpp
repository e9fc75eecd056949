#include "comm/membership/board.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "base/print_to_stderr.h"
#include "shoal/error.h"

namespace shoal {
Board::Board(std::shared_ptr<shm::HostMemory> memory, int self, const std::vector<Peer>& members,
             std::optional<StoreBoardOptions> between_hosts)
    : memory_(std::move(memory)), self_(self), members_(members), pages_(members.size()) {
  if (members.size() > most_members) {
    throw UsageError(fmt::format("an elastic job has at most {} ranks, not {}", most_members, members.size()));
  }
  if (!memory_) throw UsageError("an elastic job needs memory that its ranks share, and this system gave none");
  for (size_t member = 0; member < members.size(); ++member) {
    if (static_cast<int>(member) == self) continue;
    if (members[member].host != members[static_cast<size_t>(self)].host) continue;
    try {
      pages_[member] = memory_->peer(members[member].page);
    } catch (const std::runtime_error& error) {
      throw UsageError(fmt::format("the memory of rank {} cannot be shared: {}", member, error.what()));
    }
  }
  watch_exits();
  if (!between_hosts) return;
  elsewhere_ = std::make_shared<StoreBoard>(std::move(*between_hosts), self, hosts(), ended(),
                                            [memory = memory_] { memory->wake(); });
}

Board::Board(std::shared_ptr<shm::HostMemory> memory, int self, const std::vector<Peer>& members, const Board* former,
             std::optional<StoreBoardOptions> between_hosts)
    : memory_(std::move(memory)), self_(self), members_(members), pages_(members.size()) {
  for (size_t member = 0; member < members.size(); ++member) {
    if (static_cast<int>(member) == self || !is_on_this_host(static_cast<int>(member))) continue;
    if (former != nullptr && member < former->pages_.size()) pages_[member] = former->pages_[member];
    if (pages_[member] || members[member].page.descriptor < 0) continue;
    try {
      pages_[member] = memory_->peer(members[member].page);
    } catch (const std::runtime_error&) {  // NOLINT(bugprone-empty-catch): it counts as gone
    }
  }
  if (former != nullptr) own_ = former->own_;
  watch_exits();
  if (former != nullptr && former->elsewhere_) {
    elsewhere_ = former->elsewhere_;
    elsewhere_->grow(hosts(), ended());
  } else if (between_hosts) {
    elsewhere_ = std::make_shared<StoreBoard>(std::move(*between_hosts), self, hosts(), ended(),
                                              [memory = memory_] { memory->wake(); });
  }
}

// By member; empty: none has come.
std::vector<std::string> Board::hosts() const {
  std::vector<std::string> list;
  for (const auto& member : members_) list.push_back(member.process.pid != 0 ? member.host : "");
  return list;
}

// Members that have come since are those of another board.
std::function<bool(int member)> Board::ended() const {
  return [exits = exits_, size = members_.size()](int member) {
    return static_cast<size_t>(member) < size && exits->gone(static_cast<size_t>(member));
  };
}

bool Board::is_on_this_host(int member) const {
  return members_[static_cast<size_t>(member)].host == members_[static_cast<size_t>(self_)].host;
}

bool Board::knows(int member) const {
  if (member == self_) return true;
  if (static_cast<size_t>(member) >= pages_.size()) return false;
  return pages_[static_cast<size_t>(member)] || (elsewhere_ && elsewhere_->has(member));
}

void Board::watch_exits() {
  std::vector<ProcessId> processes;
  for (int member = 0; member < static_cast<int>(members_.size()); ++member) {
    processes.push_back(is_on_this_host(member) ? process(member) : ProcessId());
  }
  exits_ = std::make_shared<PeerExit>(processes, [memory = memory_] { memory->wake(); });
}

// Other hosts see it first: what this host's members have seen of a member that then ends, all have.
void Board::publish() {
  const auto words = to_words(*own_);
  if (elsewhere_) elsewhere_->show(words);
  memory_->show(words);
  for (const auto& page : pages_) {
    if (page) page->ring();
  }
}

void Board::show(const MemberCard& card) {
  own_->card = card;
  publish();
}

void Board::serve(uint64_t generation, int descriptor, uint64_t nonce) {
  own_->store_of = generation;
  own_->store_descriptor = descriptor;
  own_->store_nonce = nonce;
  publish();
}

void Board::lose(int living) {
  own_->lost_with = living;
  publish();
}

void Board::give_up() {
  own_->gave_up = true;
  publish();
}

int Board::lost_with() const {
  int most = 0;
  for (int member = 0; member < static_cast<int>(members_.size()); ++member) {
    most = std::max(most, entry(member).lost_with);
  }
  return most;
}

void Board::leave() noexcept {
  own_->left = true;
  try {
    publish();
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): a lost store, after which no other host goes on
  }
  if (elsewhere_) elsewhere_->stop();  // nobody waits for this member any more
}

bool Board::gone(int member) const {
  if (member == self_) return false;
  const bool has_no_page = is_on_this_host(member) && !pages_[static_cast<size_t>(member)];
  return has_no_page || (elsewhere_ ? elsewhere_->gone(member) : exits_->gone(static_cast<size_t>(member)));
}

bool Board::end(int member) const {
  if (elsewhere_ && elsewhere_->has(member)) return elsewhere_->end(member);
  return exits_->end(static_cast<size_t>(member));
}

bool Board::silent(int member) const {
  return elsewhere_ && elsewhere_->silent(member) && !elsewhere_->left(member);
}

bool Board::is_in_store(int member) const {
  return elsewhere_ && (elsewhere_->has(member) || elsewhere_->gone(member));
}

std::string Board::lost() const {
  return elsewhere_ ? elsewhere_->why_lost() : "";
}

BoardEntry Board::entry(int member) const {
  if (member == self_) return *own_;
  if (is_in_store(member)) return from_words(elsewhere_->words(member));
  const auto& page = pages_[static_cast<size_t>(member)];
  return page ? from_words(page->notice()) : BoardEntry{};
}

void Board::unmap(int member) {
  const auto& page = pages_[static_cast<size_t>(member)];
  if (page) page->unmap_arenas();
}

bool Board::is_beyond(int member, uint64_t generation) const {
  if (is_in_store(member)) return elsewhere_->number(member) > generation;
  const auto& page = pages_[static_cast<size_t>(member)];
  return page && card_number(page->notice()) > generation;
}

bool Board::failed(int member) const {
  if (elsewhere_) return elsewhere_->gone(member) && !elsewhere_->left(member);
  const auto& page = pages_[static_cast<size_t>(member)];
  return page && gone(member) && !has_left(page->notice());
}

std::map<int, MemberSight> Board::look() const {
  std::map<int, MemberSight> sights;
  const auto silent = elsewhere_ ? elsewhere_->silent_members() : std::vector<bool>(members_.size());
  for (int member = 0; member < static_cast<int>(members_.size()); ++member) {
    if (member == self_) continue;
    // Asked first: the last words of a member that has ended do not change any more.
    const bool ended = gone(member);
    const auto card = entry(member).card;
    auto& sight = sights[member];
    sight.state = ended                                 ? MemberSight::State::gone
                  : silent[static_cast<size_t>(member)] ? MemberSight::State::silent
                                                        : MemberSight::State::present;
    if (card.number > 0) sight.card = card;
  }
  return sights;
}

void Board::wait(uint32_t seen) const {
  memory_->prepare_sleep();
  memory_->sleep(seen, std::chrono::milliseconds(100));
}

int GenerationWatch::broken_by() const noexcept {
  for (size_t rank = 0; rank < members_.size(); ++rank) {
    if (board_->is_beyond(members_[rank], number_) || board_->failed(members_[rank])) return static_cast<int>(rank);
    if (board_->silent(members_[rank])) silent_ = static_cast<int>(rank);
  }
  return silent_;
}

std::string GenerationWatch::why() const {
  const int rank = broken_by();
  if (rank < 0) return board_->lost();
  // Whoever reads it has communicated where nothing catches it.
  return broken_in_words(rank) + "; between steps, communicate in Elastic's together(), which goes on without it";
}

std::string GenerationWatch::broken_in_words(int rank) const {
  const int member = members_[static_cast<size_t>(rank)];
  const auto pid = board_->process(member).pid;
  if (board_->gone(member)) {
    return fmt::format("rank {} (pid {}) is gone: it was killed, crashed or ended early", rank, pid);
  }
  if (rank == silent_) {
    return fmt::format("nothing has been heard of the host of rank {} for a while: it is lost, or cut off", rank);
  }
  return fmt::format("rank {} (pid {}) has given up generation {}", rank, pid, number_);
}

void GenerationWatch::end(int member) const {
  if (board_->entry(member).left || !board_->end(member)) return;
  print_to_stderr(
      "shoal: rank {} (pid {}; the launcher's number) is killed: the others have waited for it for more than {} s\n",
      member, board_->process(member).pid, std::chrono::duration<double>(stragglers_.limit).count());
}

void GenerationWatch::give_up(const std::string& why) const {
  try {
    board_->give_up();
  } catch (const CommError&) {  // NOLINT(bugprone-empty-catch): of a lost store, which ends the job for the others, too
  }
  report_lost(board_->self(), why);
}

}  // namespace shoal
