#include "comm/tcp/messages.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <stdexcept>

#include "base/printable.h"
#include "comm/transport/pieces.h"
#include "shoal/error.h"

namespace shoal::tcp {
namespace {
constexpr size_t most_announced = size_t{1} << 20;
}

std::shared_ptr<Message> Messages::start(Call call) {
  auto message = std::make_shared<Message>(std::move(call));
  const auto& made = message->call;
  if (made.op == Op::recv) {
    receives_.push_back(message);
    match();
    return message;
  }
  const auto number = sent_[made.peer]++;
  outgoing_[{made.peer, number}] = message;
  links_[made.peer]->put({.kind = Kind::announce,
                          .number = number,
                          .size = made.inputs[0].nbytes(),
                          .tag = made.tag,
                          .dtype = static_cast<int32_t>(made.inputs[0].scalar_type())},
                         made.label.what.substr(0, text_bytes - 1));
  return message;
}

std::byte* Messages::accept(int rank, const Frame& frame) {
  if (frame.kind == Kind::announce) {
    const bool dtype = frame.dtype >= 0 && frame.dtype < static_cast<int32_t>(c10::ScalarType::Undefined);
    if (frame.bytes >= text_bytes || !dtype)
      throw std::runtime_error("a peer has announced a message that is not valid");
    if (announced_.size() == most_announced) {
      throw std::runtime_error(fmt::format("{} messages have come that no receive asks for", most_announced));
    }
    texts_[rank].resize(frame.bytes);
    return reinterpret_cast<std::byte*>(texts_[rank].data());
  }
  const auto& list = frame.kind == Kind::ready ? outgoing_ : incoming_;
  const auto found = list.find({rank, frame.number});
  const bool known =
      found != list.end() && frame.bytes == (frame.kind == Kind::ready ? 0 : found->second->call.inputs[0].nbytes());
  if (!known) throw std::runtime_error("a peer has sent a message that is not expected");
  return frame.kind == Kind::ready ? nullptr : piece_of(found->second->call.inputs[0]).data;
}

void Messages::arrived(int rank, const Frame& frame) {
  if (frame.kind == Kind::announce) {
    announced_.push_back({rank, frame, texts_[rank]});
    match();
  } else if (frame.kind == Kind::ready) {
    const auto message = outgoing_.extract({rank, frame.number}).mapped();
    const auto data = piece_of(message->call.inputs[0]);
    ++on_their_way_;
    links_[rank]->put({.kind = Kind::message, .number = frame.number, .bytes = static_cast<uint64_t>(data.bytes)},
                      data.data, [this, message] {
                        --on_their_way_;
                        message->finished = true;
                      });
  } else {
    incoming_.extract({rank, frame.number}).mapped()->finished = true;
  }
}

// Receives with the same source and tag are served in the order of the calls, messages in that of their arrival.
void Messages::match() {
  std::set<std::pair<int, int>> waiting;
  for (auto at = receives_.begin(); at != receives_.end();) {
    auto& receive = **at;
    const int tag = receive.call.tag;
    const auto found = std::find_if(announced_.begin(), announced_.end(), [&](const Announced& one) {
      return one.frame.tag == tag && (receive.source == any_source || receive.source == one.from) &&
             waiting.count({one.from, tag}) == 0 && waiting.count({any_source, tag}) == 0;
    });
    if (found == announced_.end()) {
      waiting.emplace(receive.source, tag);
      ++at;
      continue;
    }
    require_fit(*found, receive);
    receive.source = found->from;
    incoming_[{found->from, found->frame.number}] = *at;
    links_[found->from]->put({.kind = Kind::ready, .number = found->frame.number}, std::string());
    announced_.erase(found);
    at = receives_.erase(at);
  }
}

void Messages::require_fit(const Announced& announced, const Message& receive) const {
  const auto& tensor = receive.call.inputs[0];
  const auto dtype = static_cast<c10::ScalarType>(announced.frame.dtype);
  if (dtype == tensor.scalar_type() && announced.frame.size == tensor.nbytes()) return;
  throw DisagreeError(fmt::format("rank {} sends {} bytes of {} with tag {} ({}), rank {} expects {} bytes of {} ({})",
                                  world_ranks_[announced.from], announced.frame.size, toString(dtype),
                                  announced.frame.tag, printable(announced.text), world_ranks_[rank_], tensor.nbytes(),
                                  toString(tensor.scalar_type()), receive.call.label.what));
}

}  // namespace shoal::tcp
