#include "comm/tcp/operations.h"

#include <algorithm>
#include <stdexcept>
#include <thread>
#include <utility>

#include "base/printable.h"
#include "comm/tcp/schedule.h"
#include "comm/transport/transport.h"
#include "shoal/error.h"

namespace shoal::tcp {
namespace {

constexpr size_t most_text = 4096;
constexpr int most_turns = 16;  // in one advance()
constexpr int most_parts_in_a_turn = 4;

std::vector<const Descriptor*> sockets_of(const std::vector<std::unique_ptr<Link>>& links) {
  std::vector<const Descriptor*> sockets;
  for (const auto& link : links) sockets.push_back(link ? &link->socket() : nullptr);
  return sockets;
}

}  // namespace

Operations::Operations(std::vector<std::unique_ptr<Link>> links, int rank, std::vector<int> world_ranks)
    : rank_(rank),
      world_ranks_(std::move(world_ranks)),
      staging_(new std::byte[staging_bytes(static_cast<int>(world_ranks_.size()))]),
      links_(std::move(links)),
      poller_(sockets_of(links_)),
      messages_(links_, rank_, world_ranks_),
      entries_(links_.size()),
      heard_(links_.size()),
      paused_(links_.size()) {
  watch();
}

std::shared_ptr<Collective> Operations::start_collective(const Call& call) {
  auto collective = std::make_shared<Collective>(call, issued_++, rank_, world_ranks_, staging_.get());
  collectives_.push_back(collective);
  advance();
  return collective;
}

std::shared_ptr<Message> Operations::start_message(const Call& call) {
  std::shared_ptr<Message> message;
  try_to([&] { message = messages_.start(call); });
  advance();  // after a failure, the others are told
  if (!message) std::rethrow_exception(failure_);
  return message;
}

void Operations::move(const std::vector<size_t>& ranks) {
  for (const auto rank : ranks) {
    links_[rank]->flush();
    hear(static_cast<int>(rank));
  }
}

void Operations::look_at_peers(std::chrono::seconds longest_silence) {
  for (const auto& link : links_) {
    if (link) link->look_at_peer(longest_silence);
  }
}

void Operations::end() {
  for (const auto& link : links_) {
    if (link) link->end();
  }
  if (!failure_) await_acknowledgements();
}

template <class Work>
void Operations::try_to(const Work& work) {
  if (failure_) return;
  try {
    work();
  } catch (...) {
    fail(std::current_exception());
  }
}

std::vector<int> Operations::missing(const Collective& collective) const {
  // Whoever has not called the last one that this rank has entered has not called a later one.
  const auto number = std::min(collective.number(), entries_.next(rank_) - 1);
  std::vector<int> ranks;
  for (size_t rank = 0; rank < links_.size(); ++rank) {
    if (!entries_.has(static_cast<int>(rank), number)) ranks.push_back(world_ranks_[rank]);
  }
  return ranks;
}

bool Operations::needs(const Collective& collective, int world_rank) const {
  const auto found = std::find(world_ranks_.begin(), world_ranks_.end(), world_rank);
  const auto rank = static_cast<int>(found - world_ranks_.begin());
  if (found == world_ranks_.end() || rank == rank_) return false;
  return !entries_.has(rank, collective.number()) || collective.needs(rank);
}

void Operations::hear(int rank) {
  if (failure_ || links_[rank]->ended()) return;
  try_to([&] { paused_[rank] = !links_[rank]->receive(*this); });
}

// True if a frame that had no memory, or no turn, before has been read.
bool Operations::hear_paused() {
  bool heard = false;
  for (size_t rank = 0; rank < links_.size(); ++rank) {
    if (!paused_[rank] || failure_) continue;
    const auto before = frames_;
    hear(static_cast<int>(rank));
    heard = heard || frames_ != before;
  }
  return heard;
}

void Operations::enter_next() {
  while (!collectives_.empty()) {
    const auto ahead = entries_.next(rank_) - collectives_.front()->number();
    if (ahead >= std::min(collectives_.size(), Entries::most_entered)) return;
    enter(collectives_[ahead]);
  }
}

void Operations::enter(const std::shared_ptr<Collective>& collective) {
  entries_.add(rank_, collective->entry(rank_));
  for (size_t other = 0; other < links_.size(); ++other) {
    if (!links_[other]) continue;
    collective->on_its_way();
    links_[other]->put({.kind = Kind::enter, .number = collective->number()},
                       collective->entry(static_cast<int>(other)), [collective] { collective->sent(); });
  }
}

void Operations::advance() {
  try_to([this] {
    // A connection that has sent its last frame gets the next one here, or it would never be heard of again.
    bool more = true;
    for (int turn = 0; more && turn < most_turns; ++turn) {
      enter_next();
      flush();
      more = advance_first();
      more = hear_paused() || more;
    }
    if (more) poller_.wake();  // others want the lock, too
    require_peers();
  });
  if (failure_) flush();
  watch();
}

void Operations::flush() {
  for (auto& link : links_) {
    if (link) link->flush();
  }
}

// True if there is more to do: the first operation has ended, so that the next one may begin, or has more to send.
bool Operations::advance_first() {
  if (collectives_.empty()) return false;
  auto& first = *collectives_.front();
  if (!first.begun()) {
    for (size_t rank = 0; rank < links_.size(); ++rank) {
      if (!entries_.has(static_cast<int>(rank), first.number())) return false;
    }
    first.begin(entries_.take());
  }
  bool more = false;
  for (size_t rank = 0; rank < links_.size(); ++rank) more = send_parts(static_cast<int>(rank)) || more;
  if (!first.finished()) return more;
  collectives_.pop_front();
  return true;
}

// True if more may be sent now: every rank gets its turn.
bool Operations::send_parts(int rank) {
  const auto first = collectives_.front();
  for (int sent = 0; links_[rank] && links_[rank]->idle(); ++sent) {
    if (sent == most_parts_in_a_turn) return true;
    const auto segment = first->next_to(rank);
    if (!segment) return false;
    links_[rank]->put({.kind = Kind::part, .number = first->number(), .bytes = static_cast<uint64_t>(segment->bytes)},
                      segment->data, [first] { first->sent(); });
    links_[rank]->flush();
  }
  return false;
}

// Fails if something is still to come from a rank, or to go there, that has ended.
void Operations::require_peers() {
  const auto gone = [this](int rank) { return links_[rank] && links_[rank]->ended() && !paused_[rank]; };
  const auto needed = [this](int rank) {
    if (!links_[rank]->idle()) return true;
    if (collectives_.empty()) return false;
    const auto& first = *collectives_.front();
    return first.begun() ? first.concerns(rank) : !entries_.has(rank, first.number());
  };
  int lost = messages_.needs_one_of(gone);
  for (int rank = 0; lost < 0 && rank < static_cast<int>(links_.size()); ++rank) {
    if (gone(rank) && needed(rank)) lost = rank;
  }
  if (lost >= 0) throw PeerLost(world_ranks_[lost]);
}

// Callers may use their tensors again, so that no other rank may take what is in them for data of an operation. A rank
// that was told of a fault, or that another has left, tells it to all as well: otherwise its end might be seen before
// the word of the first one arrives.
void Operations::fail(std::exception_ptr why) {
  if (failure_) return;
  failure_ = std::move(why);
  for (auto& link : links_) {
    if (link) link->take_data_back();
  }
  const auto tell_all = [this](const Frame& frame, const std::string& text) {
    for (auto& link : links_) {
      if (link) link->put(frame, text.substr(0, most_text));
    }
  };
  try {
    std::rethrow_exception(failure_);
  } catch (const DisagreeError& error) {
    tell_all({.kind = Kind::fault}, error.what());
  } catch (const Abandoned& error) {
    tell_all({.kind = Kind::leave, .tag = error.culprit()}, error.what());
  } catch (...) {  // a rank that has ended: the others see that by themselves
  }
}

std::optional<std::byte*> Operations::accept(int rank, const Frame& frame) {
  const auto into_text = [&](size_t limit) {
    if (frame.bytes > limit) throw std::runtime_error("a peer has sent more than is allowed");
    heard_[rank].resize(frame.bytes);
    return reinterpret_cast<std::byte*>(heard_[rank].data());
  };
  switch (frame.kind) {
    case Kind::enter:
      if (frame.number != entries_.next(rank))
        throw std::runtime_error("a peer has sent an entry that is not its next");
      if (entries_.full(rank)) throw std::runtime_error("a peer has entered more operations than it may");
      return into_text(sizeof(Entry) + 2 * links_.size() * sizeof(uint64_t) + bytes_with_entry);
    case Kind::part: {
      // A rank sends parts once all have entered, which it may know earlier than this one.
      if (frame.number >= issued_) throw std::runtime_error("a peer has sent a part of what is not called");
      if (collectives_.empty() || frame.number < collectives_.front()->number()) {
        throw std::runtime_error("a peer has sent a part of what has ended");
      }
      auto& first = *collectives_.front();
      return frame.number == first.number() && first.begun() ? first.place_for(rank, frame.bytes) : std::nullopt;
    }
    case Kind::announce:
    case Kind::ready:
    case Kind::message:
      return messages_.accept(rank, frame);
    case Kind::fault:
    case Kind::leave:
      return into_text(most_text);
  }
  throw std::runtime_error("a peer has sent a frame of no known kind");
}

void Operations::arrived(int rank, const Frame& frame) {
  ++frames_;
  switch (frame.kind) {
    case Kind::enter:
      static_cast<void>(read_entry(heard_[rank], links_.size()));
      entries_.add(rank, heard_[rank]);
      return;
    case Kind::part:
      collectives_.front()->received(rank);
      return;
    case Kind::announce:
    case Kind::ready:
    case Kind::message:
      messages_.arrived(rank, frame);
      return;
    case Kind::fault:
      throw DisagreeError(printable(heard_[rank]));
    case Kind::leave:
      throw Abandoned(printable(heard_[rank]), culprit_in(frame));
  }
}

int Operations::culprit_in(const Frame& frame) const {
  const auto found = std::find(world_ranks_.begin(), world_ranks_.end(), frame.tag);
  return found == world_ranks_.end() ? -1 : frame.tag;
}

// Waits until the peers' systems have what this rank has sent. A socket that is closed while bytes of the peer are
// unread drops what is still to be sent. No long wait for a host that is gone.
void Operations::await_acknowledgements() const {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  for (const auto& link : links_) {
    while (link && !link->ended() && link->unacknowledged() && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      link->look_at_peer(std::chrono::seconds(2));
    }
  }
}

void Operations::watch() {
  for (size_t rank = 0; rank < links_.size(); ++rank) {
    if (!links_[rank]) continue;
    const auto& link = *links_[rank];
    if (failure_ && link.idle()) links_[rank]->end();
    poller_.watch(rank, !failure_ && !link.ended() && !paused_[rank], !link.idle() && !link.broken());
  }
}

}  // namespace shoal::tcp
