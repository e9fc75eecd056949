#include "comm/agreement/stuck_wait.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "comm/rendezvous/world_state.h"

namespace shoal {
namespace {

constexpr auto patience = std::chrono::milliseconds(500);
constexpr auto rarely = std::chrono::seconds(5);
constexpr auto after_failure = std::chrono::milliseconds(200);
// Shorter than a rank that hosts the store stays after it knows why it ends.
constexpr auto between_questions = std::chrono::milliseconds(250);

// Without an answer from the store, the deadline decides.
template <class Ask>
std::optional<std::string> answer_of(const Ask& ask) {
  try {
    return ask();
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

}  // namespace

StuckWait::StuckWait(const GroupState& group, const Call& call, std::optional<uint64_t> number)
    : group_(group),
      numbered_(number.has_value()),
      disagreement_(group, number.value_or(0)),
      mutual_(group, call, number.value_or(0)),
      next_told_(Clock::now() + patience),
      next_look_(next_told_),
      interval_(patience) {}

std::optional<std::string> StuckWait::look(bool to_the_end) {
  const auto now = Clock::now();
  if (now < next_told_ || !group_.world->meeting.store) return std::nullopt;
  next_told_ = now + between_questions;
  if (!numbered_ || now < next_look_) return told();
  next_look_ = now + interval_;
  interval_ = std::min<Clock::duration>(2 * interval_, rarely);
  return answer_of([&]() -> std::optional<std::string> {
    if (auto difference = disagreement_.look()) return difference;
    if (!to_the_end) return std::nullopt;
    if (!std::exchange(posted_, true)) {
      mutual_.post();
      return std::nullopt;
    }
    const auto knot = mutual_.look();
    return knot ? std::optional(disagreement_.tell(*knot)) : std::nullopt;
  });
}

std::optional<std::string> StuckWait::look_after_failure() {
  const auto now = Clock::now();
  if (now < next_after_failure_) return std::nullopt;
  next_after_failure_ = now + after_failure;
  if (!numbered_) return told();
  return answer_of([this] { return disagreement_.look(); });
}

std::optional<std::string> StuckWait::told() const {
  return answer_of([this] { return disagreement_.told(); });
}

std::string StuckWait::tell(const std::string& sentence) const {
  return answer_of([&] { return std::optional(disagreement_.tell(sentence)); }).value_or(sentence);
}

void StuckWait::finished() const {
  if (!posted_) return;
  answer_of([this]() -> std::optional<std::string> {
    mutual_.withdraw();
    return std::nullopt;
  });
}

}  // namespace shoal
