#include "strategy/decentralized/known_ranks.h"

#include <algorithm>
#include <cstring>

namespace shoal {
namespace {

// Share of one step in the running mean. A smaller share makes it slow to notice weights that have changed for good; a
// larger one lets a short last batch make the next step's gradients too large.
constexpr double share_of_a_step = 0.1;

}  // namespace

KnownRanks::KnownRanks(int ranks, int own) : entries_(ranks), own_(own) {}

void KnownRanks::add(int64_t version, std::optional<double> weight, bool overflowed) {
  auto& own = entries_[own_];
  const auto steps = version - own.version;
  own.overflowed = (steps < remembered ? own.overflowed << steps : 0) | (overflowed ? 1 : 0);
  own.version = version;
  if (weight) own.weight = own.weight < 0 ? *weight : own.weight + share_of_a_step * (*weight - own.weight);
}

void KnownRanks::all_weigh(const std::vector<double>& weights) {
  for (size_t rank = 0; rank < entries_.size(); ++rank) entries_[rank].weight = weights[rank];
}

int64_t KnownRanks::message_bytes() const {
  constexpr int64_t line = 128;
  const auto bytes = static_cast<int64_t>(entries_.size() * sizeof(Entry));
  return (bytes + line - 1) / line * line;
}

void KnownRanks::write(void* message) const {
  std::memcpy(message, entries_.data(), entries_.size() * sizeof(Entry));
}

void KnownRanks::take(const void* message) {
  std::vector<Entry> theirs(entries_.size());
  std::memcpy(theirs.data(), message, theirs.size() * sizeof(Entry));
  for (size_t rank = 0; rank < entries_.size(); ++rank) {
    if (static_cast<int>(rank) != own_ && theirs[rank].version > entries_[rank].version) entries_[rank] = theirs[rank];
  }
}

std::optional<double> KnownRanks::mean_weight(const std::vector<int>& ranks) const {
  double sum = 0;
  int known = 0;
  for (const int rank : ranks) {
    if (entries_[rank].weight < 0) continue;
    sum += entries_[rank].weight;
    ++known;
  }
  return known > 0 ? std::optional(sum / known) : std::nullopt;
}

bool KnownRanks::overflowed(int64_t version) const {
  return std::any_of(entries_.begin(), entries_.end(), [&](const Entry& entry) {
    const auto ago = entry.version - version;
    return ago >= 0 && ago < remembered && (entry.overflowed >> ago & 1) != 0;
  });
}

void KnownRanks::load(std::vector<Entry> entries) {
  const auto ranks = entries_.size();
  entries_ = std::move(entries);
  if (entries_.size() != ranks) entries_.assign(ranks, {});
}

}  // namespace shoal
