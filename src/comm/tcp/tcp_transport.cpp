#include "comm/tcp/tcp_transport.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "base/printable.h"
#include "comm/rendezvous/world_state.h"
#include "comm/shm/reduce/reduce_kernels.h"
#include "comm/tcp/collective.h"
#include "comm/tcp/connect.h"
#include "comm/tcp/messages.h"
#include "comm/tcp/poller.h"
#include "comm/tcp/schedule.h"
#include "shoal/error.h"

namespace shoal {
namespace {

using tcp::Collective;
using tcp::Frame;
using tcp::Kind;
using tcp::Link;
using tcp::Message;

using SteadyClock = std::chrono::steady_clock;

std::vector<const Descriptor*> sockets_of(const std::vector<std::unique_ptr<Link>>& links) {
  std::vector<const Descriptor*> sockets;
  for (const auto& link : links) sockets.push_back(link ? &link->socket() : nullptr);
  return sockets;
}

// What all ranks have entered, or are about to.
class Entries {
 public:
  // Operations that a rank has entered and not finished, at most. The sender keeps to this: a receiver that stopped
  // reading entries could not read the parts of the oldest operation, which come behind them.
  static constexpr size_t most_entered = 512;

  explicit Entries(size_t ranks) : by_rank_(ranks) {}

  // Number of the next entry of a rank.
  uint64_t next(int rank) const { return first_ + by_rank_[rank].size(); }
  // True if another entry would be too many: its operations that are not finished begin at most `most_entered` after
  // this rank's.
  bool full(int rank) const { return by_rank_[rank].size() >= 2 * most_entered; }
  void add(int rank, tcp::EntryBytes entry) { by_rank_[rank].push_back(std::move(entry)); }
  bool has(int rank, uint64_t number) const { return number < next(rank); }
  // The entries of all ranks for the oldest operation, which is then forgotten.
  std::vector<tcp::EntryBytes> take() {
    std::vector<tcp::EntryBytes> entries;
    for (auto& list : by_rank_) {
      entries.push_back(std::move(list.front()));
      list.pop_front();
    }
    ++first_;
    return entries;
  }

 private:
  uint64_t first_ = 0;
  std::vector<std::deque<tcp::EntryBytes>> by_rank_;
};

class TcpTransport;

class TcpWork : public TransportWork {
 public:
  TcpWork(std::shared_ptr<TcpTransport> transport, std::shared_ptr<Collective> collective)
      : transport_(std::move(transport)), collective_(std::move(collective)) {}
  TcpWork(std::shared_ptr<TcpTransport> transport, std::shared_ptr<Message> message)
      : transport_(std::move(transport)), message_(std::move(message)) {}

  bool done() override;
  bool wait_for(Milliseconds slice, Milliseconds remaining) override;
  std::string waits_for() override;
  bool needs(int world_rank) override;
  int source() const override { return message_ ? message_->source : any_source; }

 private:
  bool finished() const { return collective_ ? collective_->finished() : message_->finished.load(); }

  std::shared_ptr<TcpTransport> transport_;
  std::shared_ptr<Collective> collective_;
  std::shared_ptr<Message> message_;
};

class TcpTransport : public Transport, public std::enable_shared_from_this<TcpTransport>, private tcp::Receiver {
 public:
  TcpTransport(std::vector<std::unique_ptr<Link>> links, int rank, std::vector<int> world_ranks)
      : rank_(rank),
        world_ranks_(std::move(world_ranks)),
        staging_(new std::byte[tcp::staging_bytes(static_cast<int>(world_ranks_.size()))]),
        links_(std::move(links)),
        poller_(sockets_of(links_)),
        messages_(links_, rank_, world_ranks_),
        entries_(links_.size()),
        heard_(links_.size()),
        paused_(links_.size()) {
    watch();
    thread_ = std::make_unique<std::thread>([this] { run(); });
  }

  ~TcpTransport() override {
    if (getpid() != pid_) {  // the thread is the parent's
      static_cast<void>(thread_.release());
      return;
    }
    TcpTransport::await_readers();
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    poller_.wake();
    thread_->join();
    for (const auto& link : links_) {
      if (link) link->end();
    }
    if (!failure_) await_acknowledgements();
  }

  std::string name() const override { return "tcp"; }
  bool checks_agreement() const override { return true; }

  std::unique_ptr<TransportWork> issue(const Call& call) override {
    check(call);
    const std::lock_guard lock(mutex_);
    std::unique_ptr<TransportWork> work;
    if (call.op == Op::send || call.op == Op::recv) {
      std::shared_ptr<Message> message;
      try_to([&] { message = messages_.start(call); });
      if (!message) {
        advance();  // the others are told
        std::rethrow_exception(failure_);
      }
      work = std::make_unique<TcpWork>(shared_from_this(), std::move(message));
    } else {
      auto collective = std::make_shared<Collective>(call, issued_++, rank_, world_ranks_, staging_.get());
      operations_.push_back(collective);
      work = std::make_unique<TcpWork>(shared_from_this(), std::move(collective));
    }
    advance();
    return work;
  }

  void give_up(const std::string& why) override {
    const std::lock_guard lock(mutex_);
    if (!failure_) fail(std::make_exception_ptr(CommError(why)));
  }

  void abandon(const Abandoned& why) override {
    const std::lock_guard lock(mutex_);
    if (!failure_) fail(std::make_exception_ptr(why));
    advance();  // the others are told
  }

  // A send is finished once the system has the message.
  void await_readers() override {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::seconds(10), [this] { return failure_ != nullptr || messages_.all_sent(); });
  }

  // Whether it has finished, or failed, which wait() tells.
  bool over(const std::function<bool()>& finished) {
    if (finished()) return true;
    const std::lock_guard lock(mutex_);
    return failure_ != nullptr;
  }

  bool wait(Milliseconds limit, const std::function<bool()>& finished) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, limit, [&] { return finished() || failure_ != nullptr; });
    if (!finished() && failure_) std::rethrow_exception(failure_);
    return finished();
  }

  // World ranks that have not called it.
  std::vector<int> missing(const Collective& collective) {
    const std::lock_guard lock(mutex_);
    // Whoever has not called the last one that this rank has entered has not called a later one.
    const auto number = std::min(collective.number(), entries_.next(rank_) - 1);
    std::vector<int> ranks;
    for (size_t rank = 0; rank < links_.size(); ++rank) {
      if (!entries_.has(static_cast<int>(rank), number)) ranks.push_back(world_ranks_[rank]);
    }
    return ranks;
  }

  bool needs(const Collective& collective, int world_rank) {
    const std::lock_guard lock(mutex_);
    const auto found = std::find(world_ranks_.begin(), world_ranks_.end(), world_rank);
    const auto rank = static_cast<int>(found - world_ranks_.begin());
    if (found == world_ranks_.end() || rank == rank_) return false;
    return !entries_.has(rank, collective.number()) || collective.needs(rank);
  }

 private:
  static void check(const Call& call) {
    for (const auto* tensors : {&call.inputs, &call.outputs}) {
      for (const auto& tensor : *tensors) {
        if (tensor.is_cpu()) continue;
        throw UsageError(
            fmt::format("{}: the tcp transport supports CPU tensors only, but a tensor is on {}; move it to the CPU",
                        call.describe(), tensor.device().str()));
      }
    }
    if (call.op == Op::all_reduce || call.op == Op::reduce || call.op == Op::reduce_scatter) require_reducible(call);
  }

  void run() {
    constexpr std::chrono::seconds interval(1);
    auto next_look = SteadyClock::now() + interval;
    while (true) {
      const auto ready = poller_.wait(interval);
      const std::lock_guard lock(mutex_);
      if (ending_) return;
      for (const auto place : ready) {
        links_[place]->flush();
        hear(*links_[place], static_cast<int>(place));
      }
      if (SteadyClock::now() >= next_look) {
        for (const auto& link : links_) {
          if (link) link->look_at_peer(std::chrono::seconds(15));
        }
        next_look = SteadyClock::now() + interval;
      }
      advance();
    }
  }

  template <class Work>
  void try_to(const Work& work) {
    if (failure_) return;
    try {
      work();
    } catch (...) {
      fail(std::current_exception());
    }
  }

  void hear(Link& link, int rank) {
    if (failure_ || link.ended()) return;
    try_to([&] { paused_[rank] = !link.receive(*this); });
  }

  void enter_next() {
    while (!operations_.empty()) {
      const auto ahead = entries_.next(rank_) - operations_.front()->number();
      if (ahead >= std::min(operations_.size(), Entries::most_entered)) return;
      enter(operations_[ahead]);
    }
  }

  void enter(const std::shared_ptr<Collective>& collective) {
    entries_.add(rank_, collective->entry(rank_));
    for (size_t other = 0; other < links_.size(); ++other) {
      if (!links_[other]) continue;
      collective->on_its_way();
      links_[other]->put({.kind = Kind::enter, .number = collective->number()},
                         collective->entry(static_cast<int>(other)), [collective] { collective->sent(); });
    }
  }

  // Everything that is possible now, after something has changed.
  void advance() {
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
    changed_.notify_all();
  }

  void flush() {
    for (auto& link : links_) {
      if (link) link->flush();
    }
  }

  // True if there is more to do: the first operation has ended, so that the next one may begin, or has more to send.
  bool advance_first() {
    if (operations_.empty()) return false;
    auto& first = *operations_.front();
    if (!first.begun()) {
      for (size_t rank = 0; rank < links_.size(); ++rank) {
        if (!entries_.has(static_cast<int>(rank), first.number())) return false;
      }
      first.begin(entries_.take());
    }
    bool more = false;
    for (size_t rank = 0; rank < links_.size(); ++rank) more = send_parts(static_cast<int>(rank)) || more;
    if (!first.finished()) return more;
    operations_.pop_front();
    return true;
  }

  // True if more may be sent now: every rank gets its turn.
  bool send_parts(int rank) {
    const auto first = operations_.front();
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

  // True if a frame that had no memory, or no turn, before has been read.
  bool hear_paused() {
    bool heard = false;
    for (size_t rank = 0; rank < links_.size(); ++rank) {
      if (!paused_[rank] || failure_) continue;
      const auto before = frames_;
      hear(*links_[rank], static_cast<int>(rank));
      heard = heard || frames_ != before;
    }
    return heard;
  }

  // Fails if something is still to come from a rank, or to go there, that has ended.
  void require_peers() {
    const auto gone = [this](int rank) { return links_[rank] && links_[rank]->ended() && !paused_[rank]; };
    const auto needed = [this](int rank) {
      if (!links_[rank]->idle()) return true;
      if (operations_.empty()) return false;
      const auto& first = *operations_.front();
      return first.begun() ? first.concerns(rank) : !entries_.has(rank, first.number());
    };
    int lost = messages_.needs_one_of(gone);
    for (int rank = 0; lost < 0 && rank < static_cast<int>(links_.size()); ++rank) {
      if (gone(rank) && needed(rank)) lost = rank;
    }
    if (lost >= 0) throw PeerLost(world_ranks_[lost]);
  }

  // Stops for good. The others end their operations, too, once they hear of it. Callers may use their tensors again, so
  // that no other rank may take what is in them for data of an operation. A rank that was told of a fault, or that another
  // has left, tells it to all as well: otherwise its end might be seen before the word of the first one arrives.
  void fail(std::exception_ptr why) {
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

  std::optional<std::byte*> accept(int rank, const Frame& frame) override {
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
        return into_text(sizeof(tcp::Entry) + 2 * links_.size() * sizeof(uint64_t) + tcp::bytes_with_entry);
      case Kind::part: {
        // A rank sends parts once all have entered, which it may know earlier than this one.
        if (frame.number >= issued_) throw std::runtime_error("a peer has sent a part of what is not called");
        if (operations_.empty() || frame.number < operations_.front()->number()) {
          throw std::runtime_error("a peer has sent a part of what has ended");
        }
        auto& first = *operations_.front();
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

  void arrived(int rank, const Frame& frame) override {
    ++frames_;
    switch (frame.kind) {
      case Kind::enter:
        static_cast<void>(tcp::read_entry(heard_[rank], links_.size()));
        entries_.add(rank, heard_[rank]);
        return;
      case Kind::part:
        operations_.front()->received(rank);
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

  int culprit_in(const Frame& frame) const {
    const auto found = std::find(world_ranks_.begin(), world_ranks_.end(), frame.tag);
    return found == world_ranks_.end() ? -1 : frame.tag;
  }

  // Waits until the peers' systems have what this rank has sent. A socket that is closed while bytes of the peer are unread
  // drops what is still to be sent. No long wait for a host that is gone.
  void await_acknowledgements() const {
    const auto deadline = SteadyClock::now() + std::chrono::seconds(10);
    for (const auto& link : links_) {
      while (link && !link->ended() && link->unacknowledged() && SteadyClock::now() < deadline) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        link->look_at_peer(std::chrono::seconds(2));
      }
    }
  }

  void watch() {
    for (size_t rank = 0; rank < links_.size(); ++rank) {
      if (!links_[rank]) continue;
      const auto& link = *links_[rank];
      if (failure_ && link.idle()) links_[rank]->end();
      poller_.watch(rank, !failure_ && !link.ended() && !paused_[rank], !link.idle() && !link.broken());
    }
  }

  static constexpr size_t most_text = 4096;
  static constexpr int most_turns = 16;  // under one lock
  static constexpr int most_parts_in_a_turn = 4;

  const pid_t pid_ = getpid();
  const int rank_;
  const std::vector<int> world_ranks_;
  const std::unique_ptr<std::byte[]> staging_;  // of the first operation; takes no pages before it is used
  std::mutex mutex_;                            // guards what follows
  std::condition_variable changed_;
  std::vector<std::unique_ptr<Link>> links_;  // by rank; nullptr: this one
  tcp::Poller poller_;
  tcp::Messages messages_;
  Entries entries_;
  std::deque<std::shared_ptr<Collective>> operations_;
  uint64_t issued_ = 0;
  uint64_t frames_ = 0;             // that have come
  std::vector<std::string> heard_;  // by rank: bytes of the frame that is being read
  std::vector<bool> paused_;        // by rank: its next frame has no memory yet, or has to wait for its turn
  std::exception_ptr failure_;
  bool ending_ = false;
  std::unique_ptr<std::thread> thread_;  // last member: it uses all of the above
};

bool TcpWork::done() {
  return transport_->over([this] { return finished(); });
}

bool TcpWork::wait_for(Milliseconds slice, Milliseconds) {
  return transport_->wait(slice, [this] { return finished(); });
}

bool TcpWork::needs(int world_rank) {
  return !collective_ || transport_->needs(*collective_, world_rank);
}

std::string TcpWork::waits_for() {
  if (!collective_) return "";
  const auto ranks = transport_->missing(*collective_);
  return ranks.empty() ? "" : fmt::format("rank(s) {} have not called it", fmt::join(ranks, ", "));
}

}  // namespace

std::shared_ptr<Transport> make_tcp_transport(const WorldState& world, const std::string& group, int rank,
                                              const std::vector<int>& world_ranks) {
  return std::make_shared<TcpTransport>(tcp::connect_ranks(world, group, rank, world_ranks), rank, world_ranks);
}

}  // namespace shoal
