#include "comm/agreement/disagreement.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "base/printable.h"
#include "comm/rendezvous/world_state.h"

namespace shoal {
namespace {

using Prints = std::vector<Fingerprint>;

constexpr int most_compared = 63;  // peers whose calls one rank reads
constexpr size_t most_shown = 16;  // calls that one rank publishes

std::string told_key(const WorldState& world, const std::string& group) {
  return fmt::format("{}/disagreement/{}", world.meeting.prefix, group);
}

std::string calls_key(const WorldState& world, const std::string& group, int world_rank) {
  return fmt::format("{}/calls/{}/{}", world.meeting.prefix, group, world_rank);
}

// Publishes the last calls, and the one of this number.
void show(const WorldState& world, const std::string& group, const Prints& prints, uint64_t number) {
  std::string bytes;
  for (size_t i = 0; i < prints.size(); ++i) {
    if (prints.size() - i >= most_shown && prints[i].number != number + 1) continue;
    bytes.append(reinterpret_cast<const char*>(&prints[i]), sizeof(Fingerprint));
  }
  store_set(*world.meeting.store, calls_key(world, group, world.placement.rank), bytes);
}

// Empty if the rank has published nothing, or the value is not valid.
Prints shown_by(const WorldState& world, const std::string& group, int world_rank) {
  const auto bytes = store_try_get(*world.meeting.store, calls_key(world, group, world_rank)).value_or("");
  if (bytes.size() % sizeof(Fingerprint) != 0 || bytes.size() > most_shown * sizeof(Fingerprint)) return {};
  Prints prints(bytes.size() / sizeof(Fingerprint));
  if (!prints.empty()) std::memcpy(prints.data(), bytes.data(), bytes.size());
  const bool right = std::all_of(prints.begin(), prints.end(), [](const Fingerprint& print) {
    return is_call(print) && print.number > 0 && print.text[text_bytes - 1] == 0;
  });
  return right ? prints : Prints();
}

// Compares the first number for which calls differ. by_rank: in the order in which ranks are named.
std::optional<std::string> compare(const Prints& own, const std::vector<std::pair<int, Prints>>& by_rank) {
  for (const auto& print : own) {
    std::vector<const Fingerprint*> called;
    std::vector<int> ranks;
    for (const auto& [rank, prints] : by_rank) {
      const auto found =
          std::find_if(prints.begin(), prints.end(), [&](const auto& one) { return one.number == print.number; });
      if (found == prints.end()) continue;
      called.push_back(&*found);
      ranks.push_back(rank);
    }
    if (auto difference = find_difference(called, ranks)) return difference;
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::string> Disagreement::told() const {
  const auto& world = *group_.world;
  if (!world.meeting.store) return std::nullopt;
  auto text = store_try_get(*world.meeting.store, told_key(world, group_.name));
  if (text) text = printable(*text);
  return text;
}

std::string Disagreement::tell(const WorldState& world, const std::string& group, const std::string& sentence) {
  return printable(store_set_once(*world.meeting.store, told_key(world, group), sentence));
}

std::string Disagreement::tell(const std::string& sentence) const {
  return tell(*group_.world, group_.name, sentence);
}

std::optional<std::string> Disagreement::look() {
  const auto& world = *group_.world;
  if (!world.meeting.store) return std::nullopt;
  if (auto text = told()) return text;
  if (!group_.progress->calls->keeps()) return std::nullopt;
  const auto own = group_.progress->calls->last();
  show(world, group_.name, own, number_);
  const auto size = static_cast<int>(group_.world_ranks.size());
  std::map<int, Prints> by_rank;  // by rank of the group
  by_rank[group_.rank] = own;
  for (int next = 1; next <= std::min(size - 1, most_compared); ++next) {
    const int rank = (group_.rank + next) % size;
    by_rank[rank] = shown_by(world, group_.name, group_.world_ranks[rank]);
  }
  bool all = true;
  std::vector<std::pair<int, Prints>> named;
  for (auto& [rank, prints] : by_rank) {
    all = all && !prints.empty();
    named.emplace_back(group_.world_ranks[rank], std::move(prints));
  }
  const auto difference = compare(own, named);
  if (!difference || (!std::exchange(found_, true) && !all)) return std::nullopt;
  return tell(*difference);
}

std::optional<std::string> Disagreement::look(const WorldState& world, const std::string& group, int world_rank) {
  const auto history = world.activity.history(group);
  if (!history || !history->keeps()) return std::nullopt;
  const auto own = history->last();
  std::vector<std::pair<int, Prints>> named{{world.placement.rank, own},
                                            {world_rank, shown_by(world, group, world_rank)}};
  std::sort(named.begin(), named.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  const auto difference = compare(own, named);
  return difference ? std::optional(tell(world, group, *difference)) : std::nullopt;
}

}  // namespace shoal
