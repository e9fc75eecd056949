#include "comm/telemetry/call_watch.h"

#include "comm/group/group_state.h"
#include "comm/rendezvous/world_state.h"
#include "comm/telemetry/flight_recorder.h"
#include "shoal/telemetry.h"

namespace shoal {
namespace {

Timeline* timeline(const GroupState& group) {
  return group.world->options.timeline.get();
}

Span span(const char* category, const GroupState& group, const Call& call) {
  return {.category = category,
          .name = to_string(call.op),
          .group = group.name,
          .label = call.label,
          .bytes = call.bytes(),
          .begin = {},
          .end = Clock::now()};
}

}  // namespace

CallWatch::CallWatch(const GroupState& group, const Call& call, bool published) {
  if (timeline(group) != nullptr) begin_ = Clock::now();
  auto* recorder = group.world->recorder.get();
  if (recorder == nullptr) return;
  auto& progress = *group.progress;
  if (published) {
    // It has no number, and needs no tensors.
    ticket_ = recorder->enter(FlightRecord::wait, progress.flight_group,
                              {.op = Op::barrier, .inputs = {}, .outputs = {}, .label = call.label}, 0);
  } else if (call.op == Op::send || call.op == Op::recv) {
    ticket_ = recorder->enter(FlightRecord::message, progress.flight_group, call, progress.messages++);
  } else {
    ticket_ = recorder->enter(FlightRecord::collective, progress.flight_group, call, progress.collectives++);
  }
}

void CallWatch::issued(const GroupState& group) {
  if (ticket_ != 0) group.world->recorder->issued(ticket_);
}

void CallWatch::finished(const GroupState& group, const Call& call, Clock::time_point wait_begin) {
  if (auto* lines = timeline(group)) {
    auto wait = span("wait", group, call);
    wait.begin = wait_begin;
    lines->add(std::move(wait));
  }
  finished(group, call);
}

void CallWatch::finished(const GroupState& group, const Call& call) {
  if (ticket_ != 0) group.world->recorder->finished(ticket_);
  if (auto* lines = timeline(group)) {
    auto collective = span("collective", group, call);
    collective.begin = begin_;
    lines->add(std::move(collective));
  }
}

}  // namespace shoal
