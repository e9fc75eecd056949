#pragma once
// Messages between two ranks on the host transport.

#include <atomic>
#include <list>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "comm/shm/host_group.h"
#include "shoal/detail/call.h"

namespace shoal::shm {

// Send or receive in flight.
struct Message {
  explicit Message(Call made) : call(std::move(made)) {}

  Call call;
  int source = call.peer;              // any_source until the first piece has come
  int64_t moved = 0;                   // bytes written to, or read from, the mailbox
  std::atomic<bool> finished = false;  // read by waiting threads without the transport's lock
};

// All sends and receives of this rank in one group. A message in shared memory is read in place; its send finishes once
// it has been read. Other messages pass in pieces through buffers in shared memory; their send finishes once all pieces
// have been copied there. Pieces with different tags share the slots of a mailbox: a receiver that waits for what lies
// behind them copies them to memory of its own.
class Mailboxes {
 public:
  Mailboxes(HostGroup& group, const std::vector<int>& world_ranks) : group_(group), world_ranks_(world_ranks) {}

  std::shared_ptr<Message> start(Call call);
  // Progresses messages without waiting. DisagreeError if a message does not fit its receiver.
  void advance();
  // This rank's own buffers, which may be freed once no rank reads them.
  std::vector<std::byte*> buffers() const;
  // Whether a send or receive is not finished.
  bool in_flight() const;
  // Whether receivers that are still there have read all that lies in this process's memory.
  bool all_read() const;
  // Tensors of messages that peers may still read.
  std::vector<at::Tensor> unread() const;

 private:
  struct Outbox {  // outgoing mailbox to one rank
    std::list<std::shared_ptr<Message>> queue;
    std::byte* buffers[mailbox_slots] = {};           // one piece each; allocated on first use
    std::shared_ptr<Message> reading[mailbox_slots];  // a shared message that the receiver has not finished reading
    uint64_t sent = 0;
  };
  struct Early {  // a piece that was copied before its receive
    int tag;
    int32_t dtype;
    uint64_t total;
    uint64_t begin;
    std::string text;
    std::vector<std::byte> data;
  };
  using Waiting = std::set<std::pair<int, int>>;  // source and tag of receives that are not finished

  // Progresses the receives; returns those that wait.
  Waiting receive();
  // Makes room in full mailboxes, behind which what is waited for may lie. True if there is more to receive now.
  bool make_room(const Waiting& waiting);
  bool has_piece(int from, int tag) const;
  void require_fit(const Message& receive, c10::ScalarType dtype, uint64_t total, const char* text) const;
  // Copies the piece of a slot. False if the group has failed meanwhile.
  bool copy_from(const Slot& slot, int from, std::byte* to) const;
  void release(Slot& slot, int from);
  void push(int destination, Outbox& outbox);
  bool push_piece(int destination, Outbox& outbox, Message& message, uint32_t index);
  bool pull_piece(Message& message);

  HostGroup& group_;
  const std::vector<int>& world_ranks_;
  std::vector<Outbox> outboxes_;
  std::list<std::shared_ptr<Message>> receives_;
  std::vector<std::list<Early>> early_;  // by source; older than what is in the mailbox
};

}  // namespace shoal::shm
