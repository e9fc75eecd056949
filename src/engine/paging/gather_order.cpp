#include "engine/paging/gather_order.h"

#include <fmt/format.h>
#include <torch/types.h>

#include <algorithm>
#include <set>

#include "shoal/error.h"

namespace shoal {
// FNV-1a.
int64_t GatherOrder::fingerprint(const std::vector<size_t>& pages) {
  uint64_t hash = 0xcbf29ce484222325U;
  for (const auto page : pages) hash = (hash ^ (page + 1)) * 0x100000001b3U;
  return pages.empty() ? 0 : static_cast<int64_t>(hash);
}

std::optional<size_t> GatherOrder::next(std::optional<size_t> want) {
  while (true) {
    if (const auto page = ahead()) return page;
    if (agreed_.empty() && ask(want ? static_cast<int64_t>(*want) : boundary_)) return std::nullopt;
    if (agreed_.empty()) continue;  // others begin or end a pass, which this rank does not make
    const auto page = agreed_.front();
    agreed_.pop_front();
    return page;
  }
}

std::optional<size_t> GatherOrder::ahead() {
  if (position_ == script_.size()) return std::nullopt;
  return script_[position_++];
}

const char* GatherOrder::text(int64_t said) {
  switch (said) {
    case begins_training:
      return "begins a forward for training";
    case begins_evaluation:
      return "begins a forward without gradients";
    case updates:
      return "steps its optimizer";
    case meets:
      return "has computed the shares of the batch that others do not have";
    default:
      return "has ended its backward or evaluation";
  }
}

// One round of requests. Each rank sends its request, and the fingerprint of its script for the pass or of the pages
// left. Ranks that do not make a pass know its script only if it is for training.
bool GatherOrder::ask(int64_t what) {
  const bool begins = what == begins_training || what == begins_evaluation;
  const auto pass = begins ? *pass_ : Pass::training;
  const int64_t script = begins || what == meets ? fingerprint(scripts_[static_cast<int>(pass)]) : 0;
  auto all = at::empty({2 * group_.size()}, at::kLong);
  const auto mine = at::tensor({what, what == ended ? residue_ : script}, at::kLong);
  group_.all_gather(all, mine, {-1, -1, "what to gather"}).wait();
  const auto* said = all.data_ptr<int64_t>();
  std::set<size_t> wanted;
  for (int rank = 0; rank < group_.size(); ++rank) {
    if (said[2 * rank] >= 0) wanted.insert(static_cast<size_t>(said[2 * rank]));
  }
  agreed_.assign(wanted.begin(), wanted.end());
  if (!wanted.empty()) return false;
  int first = 0;  // rank that makes a pass
  while (first + 1 < group_.size() && said[2 * first] == meets) ++first;
  const auto there = said[2 * first];
  bool equal = true;
  bool together = true;
  for (int rank = 0; rank < group_.size(); ++rank) {
    equal = equal && said[2 * rank + 1] == said[1];
    together = together && said[2 * rank] == there;
    if (said[2 * rank] == there || (said[2 * rank] == meets && there != updates)) continue;
    throw DisagreeError(
        fmt::format("rank {} {}, rank {} {}: all ranks must call the wrapper's forward and the optimizer's step() "
                    "equally often and in the same order; to evaluate on one rank alone, call the module's own forward",
                    group_.world_rank(first), text(there), group_.world_rank(rank), text(said[2 * rank])));
  }
  if (there == ended) left_alike_ = equal && together;
  if (there == begins_training || there == begins_evaluation) {
    equal = equal && said[1] != 0 && (together || there == begins_training);
    position_ = 0;
    script_ = equal ? scripts_[static_cast<int>(pass)] : std::vector<size_t>();
  }
  return what == there;
}

void GatherOrder::close() {
  if (pass_) {
    scripts_[static_cast<int>(*pass_)] = std::move(missed_);
  }
  missed_.clear();
  pass_.reset();
}

void GatherOrder::begin(Pass pass) {
  close();
  pass_ = pass;
  boundary_ = pass == Pass::training ? begins_training : begins_evaluation;
}

void GatherOrder::meet() {
  close();
  boundary_ = meets;
}

void GatherOrder::end(int64_t residue) {
  close();
  residue_ = residue;
  boundary_ = ended;
}

}  // namespace shoal
