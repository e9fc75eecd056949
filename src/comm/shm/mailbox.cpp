#include "comm/shm/mailbox.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <optional>

#include "shoal/error.h"

namespace shoal::shm {
namespace {

constexpr int64_t piece_bytes = int64_t{256} << 10;

std::byte* bytes_of(const Message& message) {
  return static_cast<std::byte*>(message.call.inputs[0].data_ptr());
}
int64_t size_of(const Message& message) {
  return static_cast<int64_t>(message.call.inputs[0].nbytes());
}

// The oldest piece with this tag (or any), or nullptr. An older piece may appear in a slot after that slot was checked.
// Whoever sees a piece sees all older ones, so the search repeats until one pass over the slots finds nothing older.
Slot* oldest(Mailbox& mailbox, std::optional<int> tag) {
  Slot* found = nullptr;
  for (bool look_again = true; look_again;) {
    look_again = false;
    for (auto& slot : mailbox.slots) {
      if (slot.state.load(std::memory_order_acquire) == 0 || (tag && slot.tag != *tag)) continue;
      if (found != nullptr && slot.order >= found->order) continue;
      found = &slot;
      look_again = true;
    }
  }
  return found;
}

bool is_full(const Mailbox& mailbox) {
  return std::all_of(std::begin(mailbox.slots), std::end(mailbox.slots),
                     [](const Slot& slot) { return slot.state.load(std::memory_order_acquire) != 0; });
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
  early_.resize(group_.size);
  auto message = std::make_shared<Message>(std::move(call));
  auto& queue = message->call.op == Op::send ? outboxes_[message->call.peer].queue : receives_;
  queue.push_back(message);
  return message;
}

bool Mailboxes::in_flight() const {
  const auto sends = [](const Outbox& outbox) {
    return !outbox.queue.empty() ||
           std::any_of(std::begin(outbox.reading), std::end(outbox.reading), [](const auto& one) { return bool(one); });
  };
  return !receives_.empty() || std::any_of(outboxes_.begin(), outboxes_.end(), sends);
}

void Mailboxes::advance() {
  for (int destination = 0; destination < static_cast<int>(outboxes_.size()); ++destination) {
    push(destination, outboxes_[destination]);
  }
  while (!receives_.empty() && make_room(receive())) {
  }
}

bool Mailboxes::has_piece(int from, int tag) const {
  const auto& early = early_[from];
  return std::any_of(early.begin(), early.end(), [&](const Early& piece) { return piece.tag == tag; }) ||
         oldest(group_.control.mailbox(from, group_.rank), tag) != nullptr;
}

// Receives with the same source and tag are served in the order of the calls.
Mailboxes::Waiting Mailboxes::receive() {
  Waiting waiting;
  const auto must_wait = [&](int source, int tag) {
    return waiting.count({source, tag}) > 0 || waiting.count({any_source, tag}) > 0;
  };
  for (auto message = receives_.begin(); message != receives_.end();) {
    auto& receive = **message;
    const int tag = receive.call.tag;
    for (int rank = 0; receive.source == any_source && rank < group_.size; ++rank) {
      if (rank != group_.rank && has_piece(rank, tag) && !must_wait(rank, tag)) receive.source = rank;
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
  return waiting;
}

bool Mailboxes::make_room(const Waiting& waiting) {
  bool made = false;
  for (int from = 0; from < group_.size; ++from) {
    const auto waits = [&](const auto& one) { return one.first == from || one.first == any_source; };
    auto& mailbox = group_.control.mailbox(from, group_.rank);
    if (from == group_.rank || std::none_of(waiting.begin(), waiting.end(), waits) || !is_full(mailbox)) continue;
    for (auto* slot = oldest(mailbox, std::nullopt); slot != nullptr; slot = oldest(mailbox, std::nullopt)) {
      std::vector<std::byte> data(slot->window.bytes);
      if (!copy_from(*slot, from, data.data())) return false;
      early_[from].push_back({slot->tag, slot->dtype, slot->total, slot->begin, slot->text, std::move(data)});
      release(*slot, from);
      made = true;
    }
  }
  return made;
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
    if (left > 0) std::memcpy(slot.data, bytes_of(message) + message.moved, left);
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

void Mailboxes::require_fit(const Message& receive, c10::ScalarType dtype, uint64_t total, const char* text) const {
  const auto& call = receive.call;
  if (dtype == call.inputs[0].scalar_type() && total == static_cast<uint64_t>(size_of(receive))) return;
  throw DisagreeError(fmt::format("rank {} sends {} bytes of {} with tag {} ({}), rank {} expects {} bytes of {} ({})",
                                  world_ranks_[receive.source], total, toString(dtype), call.tag, text,
                                  world_ranks_[group_.rank], size_of(receive), toString(call.inputs[0].scalar_type()),
                                  call.label.what));
}

bool Mailboxes::copy_from(const Slot& slot, int from, std::byte* to) const {
  const auto& window = slot.window;
  if (window.bytes == 0) return true;
  if (window.kind == Window::in_header) {
    std::memcpy(to, slot.data, window.bytes);
    return true;
  }
  const UseInPlace use(group_.control, group_.rank);
  if (!use.goes_on()) return false;
  std::memcpy(to, group_.at(from, {window.arena, window.offset}), window.bytes);
  return true;
}

void Mailboxes::release(Slot& slot, int from) {
  slot.state.store(0, std::memory_order_release);
  if (group_.peers[from]) group_.peers[from]->ring();
}

bool Mailboxes::pull_piece(Message& message) {
  const auto& call = message.call;
  const int from = message.source;
  const auto moved = [&](uint64_t bytes) {
    message.moved += static_cast<int64_t>(bytes);
    message.finished = message.moved == size_of(message);
  };
  auto& early = early_[from];
  const auto found =
      std::find_if(early.begin(), early.end(), [&](const Early& piece) { return piece.tag == call.tag; });
  if (found != early.end()) {
    require_fit(message, static_cast<c10::ScalarType>(found->dtype), found->total, found->text.c_str());
    std::copy(found->data.begin(), found->data.end(), bytes_of(message) + found->begin);
    moved(found->data.size());
    early.erase(found);
    return true;
  }
  Slot* const next = oldest(group_.control.mailbox(from, group_.rank), call.tag);
  if (next == nullptr) return false;
  require_fit(message, static_cast<c10::ScalarType>(next->dtype), next->total, next->text);
  if (!copy_from(*next, from, bytes_of(message) + next->begin)) return false;
  moved(next->window.bytes);
  release(*next, from);
  return true;
}

}  // namespace shoal::shm
