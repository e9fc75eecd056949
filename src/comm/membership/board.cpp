#include "comm/membership/board.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "shoal/error.h"

namespace shoal {
namespace {

// An entry as words: number, grown, generation of the store, its descriptor, left, lost_with, its nonce, members, base; lists as bits.
constexpr size_t number_word = 0;
constexpr size_t left_word = 4;
constexpr size_t fixed_words = 7;
constexpr size_t list_words = Board::most_members / 64;
static_assert(fixed_words + 2 * list_words <= Notice::count);

void write_list(Notice::Words& words, size_t at, const MemberList& members) {
  for (const int member : members) words[at + member / 64] |= uint64_t{1} << (member % 64);
}

MemberList read_list(const Notice::Words& words, size_t at) {
  MemberList members;
  for (int member = 0; member < Board::most_members; ++member) {
    if ((words[at + member / 64] >> (member % 64) & 1) != 0) members.push_back(member);
  }
  return members;
}

Notice::Words to_words(const BoardEntry& entry) {
  Notice::Words words{entry.card.number,
                      entry.card.grown,
                      entry.store_of,
                      static_cast<uint64_t>(entry.store_descriptor),
                      entry.left ? uint64_t{1} : 0,
                      static_cast<uint64_t>(entry.lost_with),
                      entry.store_nonce};
  write_list(words, fixed_words, entry.card.members);
  write_list(words, fixed_words + list_words, entry.card.base);
  return words;
}

BoardEntry from_words(const Notice::Words& words) {
  return {.card = {.number = words[number_word],
                   .grown = words[1],
                   .members = read_list(words, fixed_words),
                   .base = read_list(words, fixed_words + list_words)},
          .store_of = words[2],
          .store_descriptor = static_cast<int>(words[3]),
          .store_nonce = words[6],
          .left = words[left_word] != 0,
          .lost_with = static_cast<int>(words[5])};
}

}  // namespace

Board::Board(std::shared_ptr<HostMemory> memory, int self, const std::vector<Peer>& members)
    : memory_(std::move(memory)), self_(self), members_(members), pages_(members.size()) {
  if (members.size() > most_members) {
    throw UsageError(fmt::format("an elastic job has at most {} ranks, not {}", most_members, members.size()));
  }
  if (!memory_) throw UsageError("an elastic job needs memory that its ranks share, and this system gave none");
  for (size_t member = 0; member < members.size(); ++member) {
    if (static_cast<int>(member) == self) continue;
    if (members[member].host != members[static_cast<size_t>(self)].host) {
      throw UsageError(fmt::format("rank {} is on another host: an elastic job runs on one host so far", member));
    }
    try {
      pages_[member] = memory_->peer(members[member].page);
    } catch (const std::runtime_error& error) {
      throw UsageError(fmt::format("the memory of rank {} cannot be shared: {}", member, error.what()));
    }
  }
  watch_exits();
}

Board::Board(std::shared_ptr<HostMemory> memory, int self, const std::vector<Peer>& members, const Board* former)
    : memory_(std::move(memory)), self_(self), members_(members), pages_(members.size()) {
  for (size_t member = 0; member < members.size(); ++member) {
    if (static_cast<int>(member) == self) continue;
    if (former != nullptr && member < former->pages_.size()) pages_[member] = former->pages_[member];
    if (pages_[member] || members[member].page.descriptor < 0) continue;
    try {
      pages_[member] = memory_->peer(members[member].page);
    } catch (const std::runtime_error&) {  // NOLINT(bugprone-empty-catch): it counts as gone
    }
  }
  if (former != nullptr) own_ = former->own_;
  watch_exits();
}

void Board::watch_exits() {
  std::vector<ProcessId> processes;
  for (const auto& member : members_) processes.push_back(member.process);
  exits_ = std::make_unique<PeerExit>(processes, [memory = memory_] { memory->wake(); });
}

void Board::publish() {
  memory_->show(to_words(own_));
  for (const auto& page : pages_) {
    if (page) page->ring();
  }
}

void Board::show(const MemberCard& card) {
  own_.card = card;
  publish();
}

void Board::serve(uint64_t generation, int descriptor, uint64_t nonce) {
  own_.store_of = generation;
  own_.store_descriptor = descriptor;
  own_.store_nonce = nonce;
  publish();
}

void Board::lose(int living) {
  own_.lost_with = living;
  publish();
}

int Board::lost_with() const {
  int most = 0;
  for (int member = 0; member < static_cast<int>(members_.size()); ++member) {
    most = std::max(most, entry(member).lost_with);
  }
  return most;
}

void Board::leave() {
  own_.left = true;
  publish();
}

BoardEntry Board::entry(int member) const {
  if (member == self_) return own_;
  const auto& page = pages_[static_cast<size_t>(member)];
  return page ? from_words(page->notice()) : BoardEntry{};
}

void Board::unmap(int member) {
  const auto& page = pages_[static_cast<size_t>(member)];
  if (page) page->unmap_arenas();
}

bool Board::is_beyond(int member, uint64_t generation) const {
  const auto& page = pages_[static_cast<size_t>(member)];
  return page && page->notice()[number_word] > generation;
}

bool Board::failed(int member) const {
  const auto& page = pages_[static_cast<size_t>(member)];
  return page && gone(member) && page->notice()[left_word] == 0;
}

std::map<int, MemberSight> Board::look() const {
  std::map<int, MemberSight> sights;
  for (int member = 0; member < static_cast<int>(members_.size()); ++member) {
    if (member == self_) continue;
    // Asked first: the last words of a member that has ended do not change any more.
    const bool ended = gone(member);
    const auto card = entry(member).card;
    auto& sight = sights[member];
    sight.state = ended ? MemberSight::State::gone : MemberSight::State::present;
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
  }
  return -1;
}

std::string GenerationWatch::why() const {
  const int rank = broken_by();
  if (rank < 0) return "";
  const int member = members_[static_cast<size_t>(rank)];
  const auto pid = board_->process(member).pid;
  if (board_->gone(member)) {
    return fmt::format("rank {} (pid {}) is gone: it was killed, crashed or ended early", rank, pid);
  }
  return fmt::format("rank {} (pid {}) has given up generation {}", rank, pid, number_);
}

void GenerationWatch::end(int member) const {
  if (board_->entry(member).left || !board_->end(member)) return;
  fmt::print(
      stderr,
      "shoal: rank {} (pid {}; the launcher's number) is killed: the others have waited for it for more than {} s\n",
      member, board_->process(member).pid, std::chrono::duration<double>(stragglers_.limit).count());
}

}  // namespace shoal
