#pragma once
// Messages between two ranks on the tcp transport. The sender announces a message; once the receiver has a place for
// it, the data follow. So nothing has to be kept that nobody has asked for.

#include <atomic>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comm/tcp/link.h"
#include "shoal/detail/call.h"

namespace shoal::tcp {

// Send or receive in flight.
struct Message {
  explicit Message(Call made) : call(std::move(made)) {}

  Call call;
  int source = call.peer;              // any_source until one is found
  std::atomic<bool> finished = false;  // read by waiting threads without the transport's lock
};

// All sends and receives of this rank in one group.
class Messages {
 public:
  Messages(std::vector<std::unique_ptr<Link>>& links, int rank, const std::vector<int>& world_ranks)
      : links_(links), rank_(rank), world_ranks_(world_ranks), sent_(links.size()), texts_(links.size()) {}

  // Throws DisagreeError as arrived() does.
  std::shared_ptr<Message> start(Call call);
  // The frames `announce`, `ready` and `message`; see Receiver. DisagreeError if a message does not fit its receiver.
  std::byte* accept(int rank, const Frame& frame);
  void arrived(int rank, const Frame& frame);
  bool all_sent() const { return outgoing_.empty() && on_their_way_ == 0; }
  // A rank that a message cannot do without, among those for which `gone` holds; -1: none.
  template <class Gone>
  int needs_one_of(const Gone& gone) const;

 private:
  struct Announced {
    int from;
    Frame frame;
    std::string text;
  };
  using Key = std::pair<int, uint64_t>;  // rank, and number of the message

  void match();
  void require_fit(const Announced& announced, const Message& receive) const;

  std::vector<std::unique_ptr<Link>>& links_;
  const int rank_;
  const std::vector<int>& world_ranks_;
  std::vector<uint64_t> sent_;                        // number of messages sent, by rank
  std::map<Key, std::shared_ptr<Message>> outgoing_;  // announced, and the receiver is not ready
  int64_t on_their_way_ = 0;
  std::list<Announced> announced_;                    // by others, in the order of their arrival
  std::list<std::shared_ptr<Message>> receives_;      // without a message
  std::map<Key, std::shared_ptr<Message>> incoming_;  // with one, whose data have not come
  std::vector<std::string> texts_;                    // by rank: of the announcement that is being read
};

template <class Gone>
int Messages::needs_one_of(const Gone& gone) const {
  for (const auto* list : {&outgoing_, &incoming_}) {
    for (const auto& [key, message] : *list) {
      if (gone(key.first)) return key.first;
    }
  }
  for (const auto& receive : receives_) {
    if (receive->source != any_source && gone(receive->source)) return receive->source;
  }
  return -1;
}

}  // namespace shoal::tcp
