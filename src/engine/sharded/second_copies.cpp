#include "engine/sharded/second_copies.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <memory>
#include <utility>

#include "comm/group/hosts.h"
#include "comm/group/rank_groups.h"
#include "shoal/error.h"

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

std::vector<int> second_owners(const std::vector<int>& hosts) {
  const auto groups = ranks_by_host(hosts);
  std::vector<int> owners(hosts.size());
  for (size_t host = 0; host < groups.size(); ++host) {
    const auto& next = groups[(host + 1) % groups.size()];
    const size_t shift = groups.size() == 1 ? 1 : 0;
    for (size_t place = 0; place < groups[host].size(); ++place) {
      owners[static_cast<size_t>(groups[host][place])] = next[(place + shift) % next.size()];
    }
  }
  return owners;
}

void refuse_unequal_updates() {
  throw DisagreeError(
      "Elastic: the second function of step() has called the optimizer's step() on some ranks and not on others: call "
      "it on all of them, or on none, as where all skip a step; start the job again from its last checkpoint");
}

SecondCopies::SecondCopies(const Reducer& reducer)
    : reducer_(reducer),
      group_(reducer.group()),
      owners_(second_owners(hosts_of(group_))),
      copies_(reducer.buckets().size()),
      sent_(reducer.buckets().size()) {
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
  return chain(std::move(sum), [this, bucket, label] { return exchange(bucket, label); });
}

void SecondCopies::complete(const std::map<int, uint64_t>& values, uint64_t options, const Label& label) {
  bool current = true;
  for (size_t bucket = 0; bucket < copies_.size(); ++bucket) current = current && is_current(bucket);
  std::vector<double> own(1 + 2 * (2 + owners_.size()), -std::numeric_limits<double>::infinity());
  own[0] = current ? 0 : 1;
  const auto show = [&](size_t place, double value) {
    own[1 + 2 * place] = value;
    own[2 + 2 * place] = -value;
  };
  const auto in_53_bits = [](uint64_t digest) { return static_cast<double>(digest >> 11); };  // which a double has
  show(0, in_53_bits(options));
  show(1, static_cast<double>(label.step));
  for (const auto& [owner, digest] : values) show(2 + static_cast<size_t>(owner), in_53_bits(digest));
  const Label question{reducer_.step(), -1, "whether sums have changed since they were sent"};
  const auto most = group_.all_reduce(own, ReduceOp::max, question);
  require_alike(most);
  if (most[0] == 0) return;
  for (size_t bucket = 0; bucket < copies_.size(); ++bucket) {
    auto pending =
        exchange(bucket, {reducer_.step(), static_cast<int64_t>(bucket), reducer_.buckets()[bucket].names()});
    for (pending.complete(); pending.next_stage; pending.complete()) {
      pending = std::exchange(pending.next_stage, {})();
    }
  }
}

void SecondCopies::require_alike(const std::vector<double>& most) const {
  const auto differs = [&](size_t place) {
    const bool none = std::isinf(most[1 + 2 * place]);  // a rank without elements
    return !none && most[1 + 2 * place] != -most[2 + 2 * place];
  };
  if (differs(1)) refuse_unequal_updates();
  if (differs(0)) {
    throw DisagreeError(
        "ranks have different options of the optimizer (learning rate, weight decay or others): change them alike on "
        "every "
        "rank before the step");
  }
  for (size_t rank = 0; rank < owners_.size(); ++rank) {
    if (!differs(2 + rank)) continue;
    throw DisagreeError(
        fmt::format("rank {} and rank {}, which own the same shards in an elastic job, have different values of them: "
                    "change parameters between "
                    "two steps alike on all ranks, and load checkpoints before Elastic is constructed; hosts whose "
                    "CPUs have other vector "
                    "instructions round in other ways: take hosts of one kind, or the same ATEN_CPU_CAPABILITY on all",
                    rank, owners_[rank]));
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
