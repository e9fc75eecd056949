#pragma once
// Messages between two ranks on the host transport.

#include <atomic>
#include <list>
#include <memory>
#include <vector>

#include "comm/shm/host_group.h"
#include "shoal/detail/call.h"

namespace shoal {

// One send or receive in flight.
struct Message {
  explicit Message(Call made) : call(std::move(made)) {}

  Call call;
  int64_t moved = 0;                   // bytes put into, or taken out of, the mailbox
  std::atomic<bool> finished = false;  // waiting threads look at it without the transport's lock
};

// All sends and receives of this rank in one group. A message in shared memory is read in place and its sender is
// finished once it has been read; another one travels in pieces through buffers in shared memory, and its sender is
// finished once all pieces have been copied there.
class Mailboxes {
 public:
  Mailboxes(HostGroup& group, const std::vector<int>& world_ranks) : group_(group), world_ranks_(world_ranks) {}

  std::shared_ptr<Message> start(Call call);
  // Moves what can be moved without waiting. Throws DisagreeError when a message does not fit its receiver.
  void advance();
  // This rank's own buffers, to be freed when no rank reads any more.
  std::vector<std::byte*> buffers() const;
  // Tensors of messages that peers may still read.
  std::vector<at::Tensor> unread() const;

 private:
  struct Outbox {  // towards one rank
    std::list<std::shared_ptr<Message>> queue;
    std::byte* buffers[mailbox_slots] = {};           // one piece each; made when first needed
    std::shared_ptr<Message> reading[mailbox_slots];  // a shared message that the receiver has not read yet
    uint64_t sent = 0;
  };
  void push(int destination, Outbox& outbox);
  bool push_piece(int destination, Outbox& outbox, Message& message, uint32_t index);
  bool pull_piece(Message& message);

  HostGroup& group_;
  const std::vector<int>& world_ranks_;
  std::vector<Outbox> outboxes_;
  std::list<std::shared_ptr<Message>> receives_;
};

}  // namespace shoal
