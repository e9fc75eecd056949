#pragma once
// A group's operations on the tcp transport, and the connections that they move along. Never waits, and has no lock:
// the transport's guards it.

#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/tcp/collective.h"
#include "comm/tcp/entries.h"
#include "comm/tcp/link.h"
#include "comm/tcp/messages.h"
#include "comm/tcp/poller.h"
#include "shoal/detail/call.h"

namespace shoal::tcp {

class Operations : private Receiver {
 public:
  // links: by rank; nullptr: this one.
  Operations(std::vector<std::unique_ptr<Link>> links, int rank, std::vector<int> world_ranks);

  std::shared_ptr<Collective> start_collective(const Call& call);
  // Throws what has ended the operations.
  std::shared_ptr<Message> start_message(const Call& call);

  // Reads from these ranks and sends to them, after Poller::wait().
  void move(const std::vector<size_t>& ranks);
  // Everything that is possible now, after something has changed.
  void advance();
  // Ends the connections to hosts that have answered nothing for that long. To be called every second or so.
  void look_at_peers(std::chrono::seconds longest_silence);
  // Stops for good. The others end their operations, too, once they hear of it, after the next advance(). Nothing if
  // the operations have failed already.
  void fail(std::exception_ptr why);
  // nullptr: they go on.
  const std::exception_ptr& failure() const { return failure_; }
  bool all_sent() const { return messages_.all_sent(); }
  // Ends the connections, and waits until the peers' systems have what this rank has sent.
  void end();

  // World ranks that have not called it.
  std::vector<int> missing(const Collective& collective) const;
  bool needs(const Collective& collective, int world_rank) const;
  // Its wait() and wake() need no lock.
  const Poller& poller() const { return poller_; }

 private:
  template <class Work>
  void try_to(const Work& work);
  void hear(int rank);
  bool hear_paused();
  void enter_next();
  void enter(const std::shared_ptr<Collective>& collective);
  void flush();
  bool advance_first();
  bool send_parts(int rank);
  void require_peers();
  std::optional<std::byte*> accept(int rank, const Frame& frame) override;
  void arrived(int rank, const Frame& frame) override;
  int culprit_in(const Frame& frame) const;
  void await_acknowledgements() const;
  void watch();

  const int rank_;
  const std::vector<int> world_ranks_;
  const std::unique_ptr<std::byte[]> staging_;  // of the first operation; takes no pages before it is used
  std::vector<std::unique_ptr<Link>> links_;
  Poller poller_;
  Messages messages_;
  Entries entries_;
  std::deque<std::shared_ptr<Collective>> collectives_;
  uint64_t issued_ = 0;
  uint64_t frames_ = 0;             // that have come
  std::vector<std::string> heard_;  // by rank: bytes of the frame that is being read
  std::vector<bool> paused_;        // by rank: its next frame has no memory yet, or has to wait for its turn
  std::exception_ptr failure_;
};

}  // namespace shoal::tcp
