#include "engine/sharded/second_copies.h"

#include <memory>
#include <utility>

#include "comm/group/hosts.h"
#include "engine/sharded/second_owners.h"

namespace shoal {
namespace {

constexpr int tag = 0x5ec0;  // no other messages of the group have it

// Waits for one after the other.
PendingExchange all_of(const std::shared_ptr<std::vector<Work>>& works, size_t first = 0) {
  if (first == works->size()) return {};
  PendingExchange pending{std::move((*works)[first])};
  if (first + 1 < works->size()) pending.next_stage = [works, first] { return all_of(works, first + 1); };
  return pending;
}

}  // namespace

SecondCopies::SecondCopies(const Reducer& reducer)
    : reducer_(reducer), group_(reducer.group()), owners_(choose_second_owners(hosts_of(group_))) {
  make();
}

void SecondCopies::make() {
  built_ = reducer_.buckets().builds();
  copies_.assign(reducer_.buckets().size(), {});
  sent_.assign(copies_.size(), 0);
  const auto& plan = reducer_.reduction().plan();
  for (size_t number = 0; number < copies_.size(); ++number) {
    const auto& bucket = reducer_.buckets()[number];
    if (!bucket.kept_range().empty()) sent_[number] = bucket.kept()._version();
    for (int rank = 0; rank < group_.size(); ++rank) {
      const auto range = plan.kept(bucket, rank);
      if (owners_[static_cast<size_t>(rank)] != group_.rank() || range.empty()) continue;
      copies_[number].push_back({rank, range, group_.allocate(range.size(), bucket.options())});
    }
  }
}

bool SecondCopies::is_current(size_t bucket) const {
  const auto& of = reducer_.buckets()[bucket];
  return of.kept_range().empty() || of.kept()._version() == sent_[bucket];
}

PendingExchange SecondCopies::exchange(size_t bucket, const Label& label) {
  const Label named{label.step, label.bucket, "second copy of " + label.what};
  const auto& of = reducer_.buckets()[bucket];
  const auto works = std::make_shared<std::vector<Work>>();
  for (const auto& copy : copies_[bucket]) works->push_back(group_.recv(copy.sum, copy.owner, tag, named));
  if (!of.kept_range().empty()) {
    works->push_back(group_.send(of.kept(), owners_[static_cast<size_t>(group_.rank())], tag, named));
    sent_[bucket] = of.kept()._version();
  }
  return all_of(works);
}

PendingExchange SecondCopies::follow(PendingExchange sum, size_t bucket, const Label& label) {
  if (!of_these_buckets()) make();
  return chain(std::move(sum), [self = shared_from_this(), bucket, label] { return self->exchange(bucket, label); });
}

void SecondCopies::complete(SecondOwnerCheck check) {
  for (size_t bucket = 0; bucket < copies_.size(); ++bucket) check.asks = check.asks || !is_current(bucket);
  const Label label{reducer_.step(), -1, "whether sums have changed since they were sent"};
  if (!check.ask(group_, owners_, label).asked) return;
  for (size_t bucket = 0; bucket < copies_.size(); ++bucket) {
    auto pending =
        exchange(bucket, {reducer_.step(), static_cast<int64_t>(bucket), reducer_.buckets()[bucket].names()});
    for (pending.complete(); pending.next_stage; pending.complete()) {
      pending = std::exchange(pending.next_stage, {})();
    }
  }
}

void SecondCopies::change_alike(const std::function<void()>& change) {
  std::vector<bool> current;
  for (size_t bucket = 0; bucket < copies_.size(); ++bucket) current.push_back(is_current(bucket));
  change();
  for (size_t bucket = 0; bucket < copies_.size(); ++bucket) {
    const auto& of = reducer_.buckets()[bucket];
    if (current[bucket] && !of.kept_range().empty()) sent_[bucket] = of.kept()._version();
  }
}

}  // namespace shoal
