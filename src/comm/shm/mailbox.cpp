#include "comm/shm/mailbox.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "shoal/error.h"

namespace shoal {
namespace {

constexpr int64_t piece_bytes = int64_t{256} << 10;

std::byte* bytes_of(const Message& message) {
  return static_cast<std::byte*>(message.call.inputs[0].data_ptr());
}
int64_t size_of(const Message& message) {
  return static_cast<int64_t>(message.call.inputs[0].nbytes());
}

// The oldest piece with this tag, or nullptr. An older piece may appear in a slot after that slot was checked. Whoever
// sees a piece sees all older ones, so the search repeats until one pass over the slots finds nothing older.
Slot* oldest(Mailbox& mailbox, int tag) {
  Slot* found = nullptr;
  for (bool look_again = true; look_again;) {
    look_again = false;
    for (auto& slot : mailbox.slots) {
      if (slot.state.load(std::memory_order_acquire) == 0 || slot.tag != tag) continue;
      if (found != nullptr && slot.order >= found->order) continue;
      found = &slot;
      look_again = true;
    }
  }
  return found;
}

}  // namespace

std::vector<std::byte*> Mailboxes::buffers() const {
  std::vector<std::byte*> list;
  for (const auto& outbox : outboxes_) {
    std::copy_if(std::begin(outbox.buffers), std::end(outbox.buffers), std::back_inserter(list),
                 [](const std::byte* buffer) { return buffer != nullptr; });
  }
  return list;
}

bool Mailboxes::all_read() const {
  for (int destination = 0; destination < static_cast<int>(outboxes_.size()); ++destination) {
    if (outboxes_[destination].sent == 0 || !group_.peers[destination] || group_.peers[destination]->gone()) continue;
    for (const auto& slot : group_.control.mailbox(group_.rank, destination).slots) {
      if (slot.state.load(std::memory_order_acquire) != 0 && slot.window.kind != Window::in_header) return false;
    }
  }
  return true;
}

std::vector<at::Tensor> Mailboxes::unread() const {
  std::vector<at::Tensor> tensors;
  for (const auto& outbox : outboxes_) {
    for (const auto& message : outbox.reading) {
      if (message) tensors.push_back(message->call.inputs[0]);
    }
  }
  return tensors;
}

std::shared_ptr<Message> Mailboxes::start(Call call) {
  outboxes_.resize(group_.size);
  auto message = std::make_shared<Message>(std::move(call));
  auto& queue = message->call.op == Op::send ? outboxes_[message->call.peer].queue : receives_;
  queue.push_back(message);
  return message;
}

void Mailboxes::advance() {
  for (int destination = 0; destination < static_cast<int>(outboxes_.size()); ++destination) {
    push(destination, outboxes_[destination]);
  }
  // Receives with the same source and tag are served in the order of the calls.
  std::set<std::pair<int, int>> waiting;
  const auto must_wait = [&](int source, int tag) {
    return waiting.count({source, tag}) > 0 || waiting.count({any_source, tag}) > 0;
  };
  for (auto message = receives_.begin(); message != receives_.end();) {
    auto& receive = **message;
    const int tag = receive.call.tag;
    for (int rank = 0; receive.source == any_source && rank < group_.size; ++rank) {
      const bool has_sent = rank != group_.rank && oldest(group_.control.mailbox(rank, group_.rank), tag) != nullptr;
      if (has_sent && !must_wait(rank, tag)) receive.source = rank;
    }
    if (receive.source != any_source && !must_wait(receive.source, tag)) {
      while (!receive.finished && pull_piece(receive)) {
      }
    }
    if (receive.finished) {
      message = receives_.erase(message);
    } else {
      waiting.emplace(receive.source, tag);
      ++message;
    }
  }
}

void Mailboxes::push(int destination, Outbox& outbox) {
  auto& mailbox = group_.control.mailbox(group_.rank, destination);
  for (uint32_t index = 0; index < mailbox_slots; ++index) {
    if (mailbox.slots[index].state.load(std::memory_order_acquire) != 0) continue;
    if (auto read = std::move(outbox.reading[index])) read->finished = true;
    if (outbox.queue.empty()) continue;
    const auto message = outbox.queue.front();
    const bool shared = push_piece(destination, outbox, *message, index);
    if (shared) outbox.reading[index] = message;
    if (message->moved < size_of(*message)) continue;
    outbox.queue.pop_front();
    message->finished = !shared;
  }
}

bool Mailboxes::push_piece(int destination, Outbox& outbox, Message& message, uint32_t index) {
  auto& slot = group_.control.mailbox(group_.rank, destination).slots[index];
  const auto& call = message.call;
  const auto left = size_of(message) - message.moved;
  slot.tag = call.tag;
  slot.dtype = static_cast<int32_t>(call.inputs[0].scalar_type());
  slot.order = outbox.sent++;
  slot.total = static_cast<uint64_t>(size_of(message));
  slot.begin = static_cast<uint64_t>(message.moved);
  slot.window = {};
  const auto length = std::min(call.label.what.size(), text_bytes - 1);
  std::memcpy(slot.text, call.label.what.data(), length);
  slot.text[length] = 0;
  const auto place = group_.memory->locate(bytes_of(message), size_of(message));
  if (left <= static_cast<int64_t>(inline_bytes)) {
    slot.window.kind = Window::in_header;
    slot.window.bytes = static_cast<uint64_t>(left);
    std::memcpy(slot.data, bytes_of(message) + message.moved, left);
  } else if (place && message.moved == 0) {
    slot.window = {Window::shared, place->arena, place->offset, slot.total};
  } else {
    auto*& buffer = outbox.buffers[index];
    if (buffer == nullptr) buffer = group_.memory->allocate(piece_bytes);
    const auto at = *group_.memory->locate(buffer, 1);
    slot.window = {Window::staged, at.arena, at.offset, static_cast<uint64_t>(std::min(left, piece_bytes))};
    std::memcpy(buffer, bytes_of(message) + message.moved, slot.window.bytes);
  }
  message.moved += static_cast<int64_t>(slot.window.bytes);
  slot.state.store(1, std::memory_order_release);
  if (group_.peers[destination]) group_.peers[destination]->ring();
  return slot.window.kind == Window::shared;
}

bool Mailboxes::pull_piece(Message& message) {
  const auto& call = message.call;
  const int from = message.source;
  auto& mailbox = group_.control.mailbox(from, group_.rank);
  Slot* const next = oldest(mailbox, call.tag);
  if (next == nullptr) return false;
  const auto dtype = static_cast<c10::ScalarType>(next->dtype);
  if (dtype != call.inputs[0].scalar_type() || next->total != static_cast<uint64_t>(size_of(message))) {
    throw DisagreeError(
        fmt::format("rank {} sends {} bytes of {} with tag {} ({}), rank {} expects {} bytes of {} ({})",
                    world_ranks_[from], next->total, toString(dtype), call.tag, next->text, world_ranks_[group_.rank],
                    size_of(message), toString(call.inputs[0].scalar_type()), call.label.what));
  }
  const auto& window = next->window;
  const std::byte* source =
      window.kind == Window::in_header ? next->data : group_.at(from, {window.arena, window.offset});
  std::memcpy(bytes_of(message) + next->begin, source, window.bytes);
  message.moved += static_cast<int64_t>(window.bytes);
  message.finished = message.moved == size_of(message);
  next->state.store(0, std::memory_order_release);
  if (group_.peers[from]) group_.peers[from]->ring();
  return true;
}

}  // namespace shoal
