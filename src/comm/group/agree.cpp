#include "shoal/group.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/printable.h"
#include "comm/group/text.h"
#include "shoal/error.h"

namespace shoal {
namespace {

// FNV-1a with a separator after every item, so that moving text between items changes the value.
int64_t fingerprint(const std::vector<std::string>& items) {
  uint64_t hash = 0xcbf29ce484222325U;
  const auto add = [&hash](unsigned char byte) { hash = (hash ^ byte) * 0x100000001b3U; };
  for (const auto& item : items) {
    for (const char c : item) add(static_cast<unsigned char>(c));
    add(0);
  }
  return static_cast<int64_t>(hash);
}

std::vector<int64_t> gather_numbers(const Group& group, int64_t own, const Label& label) {
  auto all = at::empty({group.size()}, at::kLong);
  group.all_gather(all, at::full({1}, own, at::kLong), label).wait();
  return {all.data_ptr<int64_t>(), all.data_ptr<int64_t>() + group.size()};
}

// Gathers the lists of all ranks.
std::vector<std::vector<std::string>> gather_items(const Group& group, const std::vector<std::string>& items,
                                                   const Label& label) {
  std::string text;
  for (const auto& item : items) text += item + '\n';
  std::vector<std::vector<std::string>> lists;
  for (const auto& received : all_gather_text(group, text, label)) {
    auto& list = lists.emplace_back();
    for (size_t begin = 0, end = 0; begin < received.size(); begin = end + 1) {
      end = received.find('\n', begin);
      list.push_back(received.substr(begin, end - begin));
    }
  }
  return lists;
}

}  // namespace

void agree(const Group& group, const std::string& subject, const std::vector<std::string>& items) {
  const Label label{-1, -1, "agreement on " + subject};
  const auto prints = gather_numbers(group, fingerprint(items), label);
  const auto other = std::find_if(prints.begin(), prints.end(), [&](int64_t print) { return print != prints[0]; });
  if (other == prints.end()) return;
  const auto rank = static_cast<int>(other - prints.begin());
  const auto lists = gather_items(group, items, label);
  const auto& first = lists[0];
  const auto& second = lists[rank];
  size_t i = 0;
  while (i < first.size() && i < second.size() && first[i] == second[i]) ++i;
  const auto at = [i](const std::vector<std::string>& list) {
    return i < list.size() ? printable(list[i]) : "nothing";
  };
  throw DisagreeError(fmt::format("{}: ranks disagree at item {}: rank {} has {}, rank {} has {}", subject, i,
                                  group.world_rank(0), at(first), group.world_rank(rank), at(second)));
}

}  // namespace shoal
