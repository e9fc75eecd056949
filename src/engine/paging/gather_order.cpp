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
      return "has computed the slices of the batch that others do not have";
    default:
      return "has ended its backward or evaluation";
  }
}

std::vector<GatherOrder::Answer> GatherOrder::answers_to(const Answer& mine) const {
  auto all = at::empty({2 * group_.size()}, at::kLong);
  group_
      .all_gather(all, at::tensor({mine.said, mine.pages}, at::kLong),
                  {-1, -1, "which unit FullyShardedDataParallel gathers (forwards: equally many on all ranks)"})
      .wait();
  std::vector<Answer> answers;
  const auto* numbers = all.const_data_ptr<int64_t>();
  for (int rank = 0; rank < group_.size(); ++rank) answers.push_back({numbers[2 * rank], numbers[2 * rank + 1]});
  return answers;
}

// One round of requests. Each rank sends its request, and the fingerprint of its script for the pass or of the pages
// left. Ranks that do not make a pass know its script only if it is for training.
bool GatherOrder::ask(int64_t what) {
  const bool begins = what == begins_training || what == begins_evaluation;
  const auto pass = begins ? *pass_ : Pass::training;
  const int64_t script = begins || what == meets ? fingerprint(scripts_[static_cast<int>(pass)]) : 0;
  const auto answers = answers_to({what, what == ended ? residue_ : script});
  std::set<size_t> wanted;
  for (const auto& answer : answers) {
    if (answer.said >= 0) wanted.insert(static_cast<size_t>(answer.said));
  }
  agreed_.assign(wanted.begin(), wanted.end());
  if (!wanted.empty()) return false;
  size_t first = 0;  // rank that makes a pass
  while (first + 1 < answers.size() && answers[first].said == meets) ++first;
  const auto there = answers[first].said;
  bool equal = true;
  bool together = true;
  for (size_t rank = 0; rank < answers.size(); ++rank) {
    const auto& [said, pages] = answers[rank];
    equal = equal && pages == answers.front().pages;
    together = together && said == there;
    if (said == there || (said == meets && there != updates)) continue;
    throw DisagreeError(
        fmt::format("rank {} {}, rank {} {}: all ranks must call the wrapper's forward and the optimizer's step() "
                    "equally often and in the same order; to evaluate on one rank alone, call the module's own forward",
                    group_.world_rank(static_cast<int>(first)), text(there), group_.world_rank(static_cast<int>(rank)),
                    text(said)));
  }
  if (there == ended) left_alike_ = equal && together;
  if (there == begins_training || there == begins_evaluation) {
    equal = equal && answers.front().pages != 0 && (together || there == begins_training);
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
