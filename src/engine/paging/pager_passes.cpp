// Passes over the pages, and other points that all ranks reach: those that are ahead take part in the gathers of the
// others.

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <algorithm>
#include <utility>

#include "comm/store/warn.h"
#include "engine/paging/pager.h"
#include "shoal/group.h"

namespace shoal {

void Pager::help_others() {
  while (const auto next = order_.next(std::nullopt)) gather_for_others(*next);
}

// Reshards pages that were gathered ahead and not used.
void Pager::reshard_unused() {
  for (size_t index = 0; index < pages_.size(); ++index) {
    if (!pages_[index]->used) reshard(index);
  }
}

void Pager::begin(Pass pass) {
  const std::lock_guard lock(mutex_);
  const torch::NoGradGuard no_grad;
  order_.begin(pass);
  help_others();
  if (options_.check_order) check_order(pass);
  reshard_unused();
}

void Pager::check_order(Pass pass) {
  uses_.begin(pass);
  const auto& uses = uses_.of(pass);
  const auto names_of = [this](const std::vector<size_t>& pages) {
    std::vector<std::string> names;
    for (const auto index : pages) names.push_back(pages_[index]->source.name);
    return names;
  };
  agree(group_, "the order in which units are used", names_of(uses.last));
  if (!uses.changed() || std::exchange(warned_, true)) return;
  warn(fmt::format("the order of units has changed from one pass to the next: it was {}; now it is {}",
                   fmt::join(names_of(uses.before), ", "), fmt::join(names_of(uses.last), ", ")));
}

void Pager::end() {
  const std::lock_guard lock(mutex_);
  const torch::NoGradGuard no_grad;
  std::vector<size_t> left(used_.begin(), used_.end());
  std::sort(left.begin(), left.end());
  order_.end(GatherOrder::fingerprint(left));
  help_others();
  uses_.end();
  reshard_unused();
  // Uses outside of passes are collective, so that all ranks must have the same pages in memory, or none.
  if (order_.left_alike()) return;
  for (const auto index : left) {
    if (pages_[index]->users == 0) reshard(index);
  }
}

void Pager::update() {
  const std::lock_guard lock(mutex_);
  const torch::NoGradGuard no_grad;
  order_.update();
  help_others();
}

void Pager::meet() {
  const std::lock_guard lock(mutex_);
  const torch::NoGradGuard no_grad;
  order_.meet();
  help_others();
  for (size_t index = 0; index < pages_.size(); ++index) {  // so that all ranks gather the same in the next pass
    if (pages_[index]->users == 0) reshard(index);
  }
}

void Pager::unshard_all(bool stay, const std::set<std::string>& but) {
  const std::lock_guard lock(mutex_);
  const torch::NoGradGuard no_grad;
  for (size_t index = 0; index < pages_.size(); ++index) {
    auto& page = *pages_[index];
    if (but.contains(page.source.name)) continue;
    unshard(index);
    if (!stay) {
      if (page.users == 0) reshard(index);
      continue;
    }
    ++page.users;
    unsharded_.push_back(index);
  }
}

void Pager::reshard_all(bool store) {
  const std::lock_guard lock(mutex_);
  const torch::NoGradGuard no_grad;
  for (const auto index : std::exchange(unsharded_, {})) {
    auto& page = *pages_[index];
    --page.users;
    if (store) store_own(page);
  }
  // Other writes are dropped. Ranks that held nothing have other pages in memory, so all pages are resharded.
  for (size_t index = 0; index < pages_.size(); ++index) {
    if (pages_[index]->users == 0) reshard(index);
  }
}

}  // namespace shoal
