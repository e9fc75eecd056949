#include "shoal/telemetry.h"

#include "comm/group/group_state.h"
#include "comm/rendezvous/world_state.h"

namespace shoal {

void Timeline::add(Span span) {
  const std::lock_guard lock(mutex_);
  spans_.push_back(std::move(span));
}

std::vector<Span> Timeline::spans() const {
  const std::lock_guard lock(mutex_);
  return spans_;
}

Timeline* timeline_of(const Group& group) {
  return state_of(group)->world->options.timeline.get();
}

TimedScope::TimedScope(Timeline* timeline, const char* name, int64_t step)
    : timeline_(timeline), name_(name), step_(step) {
  if (timeline_ != nullptr) begin_ = Clock::now();
}

TimedScope::~TimedScope() {
  if (timeline_ == nullptr) return;
  timeline_->add({.category = "compute",
                  .name = name_,
                  .group = {},
                  .label = {step_, -1, ""},
                  .begin = begin_,
                  .end = Clock::now()});
}

namespace {

Clock::duration since_start() {
  return Clock::now().time_since_epoch();
}

at::Tensor nanoseconds(Clock::duration time) {
  return at::full({1}, std::chrono::duration_cast<std::chrono::nanoseconds>(time).count(), at::kLong);
}

// Cristian's algorithm: the peer reads its clock halfway through the round trip, with an error of at most half of it.
Clock::duration offset_from_round_trips(const Group& group, int rounds) {
  const Label label{-1, -1, "clock"};
  auto theirs = at::zeros({1}, at::kLong);
  auto shortest = Clock::duration::max();
  Clock::duration offset{};
  for (int round = 0; round < rounds; ++round) {
    const auto sent = since_start();
    group.send(nanoseconds(sent), 0, 0, label).wait();
    group.recv(theirs, 0, 0, label).wait();
    const auto back = since_start();
    if (back - sent >= shortest) continue;
    shortest = back - sent;
    offset = std::chrono::nanoseconds(theirs.item<int64_t>()) - (sent + shortest / 2);
  }
  return std::chrono::abs(offset) <= shortest / 2 ? Clock::duration(0) : offset;
}

}  // namespace

Clock::duration clock_offset(const Group& group) {
  constexpr int rounds = 8;
  if (group.rank() > 0) return offset_from_round_trips(group, rounds);
  const Label label{-1, -1, "clock"};
  auto request = at::zeros({1}, at::kLong);
  for (int rank = 1; rank < group.size(); ++rank) {
    for (int round = 0; round < rounds; ++round) {
      group.recv(request, rank, 0, label).wait();
      group.send(nanoseconds(since_start()), rank, 0, label).wait();
    }
  }
  return {};
}

}  // namespace shoal
