#include "launch/newcomers.h"

#include <fmt/format.h>

#include <stdexcept>
#include <utility>

#include "shoal/error.h"

namespace shoal {
namespace {

constexpr std::chrono::seconds limit_of_the_store(30);

}  // namespace

Newcomers::Newcomers(const LaunchOptions& options, int first_ranks, const std::string& job, JobStore& store)
    : first_ranks_(first_ranks),
      most_ranks_(options.most_ranks),
      address_(options.address),
      job_(job),
      store_(store),
      next_(first_ranks) {
  if (!possible() || options.nodes > 1) return;
  try {
    board_.emplace(job, first_ranks);
  } catch (const std::runtime_error& error) {
    throw UsageError(fmt::format("--elastic with a number of ranks to grow to needs shared memory: {}", error.what()));
  }
}

bool Newcomers::is_member(int rank, bool wait) {
  return board_ ? board_->is_member(rank) : store_.has_joined(rank, wait);
}

void Newcomers::ask(const std::string& why) {
  asked_.push_back({why, Clock::now()});
  if (!board_) store_.ask_for_number(first_ranks_);
}

std::optional<std::pair<int, std::string>> Newcomers::next() {
  if (asked_.empty()) return std::nullopt;
  const auto number = board_ ? std::optional(next_) : store_.take_number();
  if (number) next_ = *number;
  if (!number || next_ >= JoinTable::most_members) return std::nullopt;
  ++next_;
  auto why = std::move(asked_.front().why);
  asked_.pop_front();
  return std::pair(*number, std::move(why));
}

std::vector<std::string> Newcomers::given_up() {
  std::vector<std::string> list;
  const bool no_more = next_ >= JoinTable::most_members;
  while (!asked_.empty() && (no_more || Clock::now() > asked_.front().since + limit_of_the_store)) {
    list.push_back(fmt::format("{}: {}", asked_.front().why,
                               no_more
                                   ? fmt::format("a job has {} processes at most in its life", JoinTable::most_members)
                                   : "the job's store has given no number"));
    asked_.pop_front();
  }
  return list;
}

std::vector<std::string> Newcomers::drop() {
  std::vector<std::string> list;
  for (auto& one : std::exchange(asked_, {})) list.push_back(std::move(one.why));
  return list;
}

void Newcomers::add_variables(int rank, Variables& list) const {
  if (!possible()) return;
  const OpenJob open{first_ranks_, most_ranks_, address_, store_.port()};
  list.emplace_back(join_variable, board_ ? board_->address() : join_over_hosts(open, job_));
  if (is_one(rank)) list.emplace_back(newcomer_variable, fmt::format("{} {}", rank, job_));
}

}  // namespace shoal
