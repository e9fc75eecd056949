#include "shoal/join.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "shoal/error.h"

namespace shoal {

Join::Join(std::initializer_list<std::reference_wrapper<Joinable>> joinables, const JoinOptions& options)
    : options_(options) {
  for (Joinable& joinable : joinables) joinables_.push_back(&joinable);
  if (joinables_.empty()) throw UsageError("Join: give at least one wrapper");
  for (auto* joinable : joinables_) {
    const auto& other = joinable->group();
    if (other.size() != group().size() || other.rank() != group().rank()) {
      throw UsageError(
          fmt::format("Join: this process is rank {} of {} in one wrapper and rank {} of {} in another; use the same "
                      "group for all wrappers",
                      group().rank(), group().size(), other.rank(), other.size()));
    }
    if (!options_.throw_on_early_termination) joinable->check_shadow();
  }
}

Join::~Join() {
  set_join_state({});
}

bool Join::next(bool has_batch) {
  for (auto* joinable : joinables_) joinable->settle();
  const auto have = gather(has_batch);
  const auto absent = std::count(have.begin(), have.end(), 0);
  if (absent == group().size()) {
    if (steps_ > 0) {
      for (auto* joinable : joinables_) joinable->broadcast_model(now_.first);
    }
    set_join_state({});
    steps_ = 0;
    return false;
  }
  if (absent > 0 && options_.throw_on_early_termination) {
    std::vector<int> ranks;
    for (int rank = 0; rank < group().size(); ++rank) {
      if (have[rank] == 0) ranks.push_back(group().world_rank(rank));
    }
    throw InputsExhausted(fmt::format(
        "rank {} has no batch left after {} steps, but other ranks have; all ranks stop (throw_on_early_termination)",
        fmt::join(ranks, ", "), steps_));
  }
  now_ = {.here = has_batch,
          .first = static_cast<int>(std::find(have.begin(), have.end(), 1) - have.begin()),
          .absent = static_cast<int>(absent),
          .by_initial_size = options_.divide_by_initial_world_size};
  set_join_state(now_);
  ++steps_;
  return true;
}

int Join::active_ranks() const {
  return group().size() - now_.absent;
}

std::vector<int64_t> Join::gather(bool has_batch) const {
  auto all = at::empty({group().size()}, at::kLong);
  group().all_gather(all, at::full({1}, has_batch ? 1 : 0, at::kLong), {steps_, -1, "who has a batch"}).wait();
  const auto* begin = all.data_ptr<int64_t>();
  return {begin, begin + all.numel()};
}

void Join::set_join_state(const std::optional<JoinState>& join_state) {
  for (auto* joinable : joinables_) joinable->set_join_state(join_state);
}

}  // namespace shoal
