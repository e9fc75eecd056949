#include "wrappers/step_agreement.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/printable.h"
#include "comm/group/text.h"
#include "shoal/error.h"
#include "wrappers/python_options.h"

namespace shoal::python {
namespace {

const PythonOptions& python_options_of(const torch::optim::OptimizerParamGroup& group) {
  return static_cast<const PythonOptions&>(group.options());
}

bool equal_on_all(const Group& group, uint64_t digest, const Label& label) {
  auto all = at::empty({group.size()}, at::kLong);
  const auto own = static_cast<int64_t>(digest);
  group.all_gather(all, at::full({1}, own, at::kLong), label).wait();
  return std::all_of(all.data_ptr<int64_t>(), all.data_ptr<int64_t>() + all.numel(),
                     [&](int64_t other) { return other == own; });
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t begin = 0, end = 0; begin < text.size(); begin = end + 1) {
    end = text.find('\n', begin);
    lines.push_back(text.substr(begin, end - begin));
  }
  return lines;
}

std::string options_in_words(const ParamGroups& groups) {
  std::string text;
  for (size_t number = 0; number < groups.size(); ++number) {
    for (const auto& line : python_options_of(groups[number]).lines()) {
      text += fmt::format("param group {}: {}\n", number, printable(line));
    }
  }
  return text;
}

}  // namespace

void StepAgreement::meet(const ParamGroups& groups, const std::string& failure) const {
  if (group_.size() == 1) return;
  uint64_t digest = failure.empty() ? 0 : 1 + static_cast<uint64_t>(group_.rank());
  for (const auto& group : groups) digest = digest * 31 + python_options_of(group).digest();
  const Label label{-1, -1, "options of the optimizer"};
  if (equal_on_all(group_, digest, label)) return;
  const auto failures = all_gather_text(group_, failure, label);
  for (int rank = 0; rank < group_.size(); ++rank) {
    if (failures[rank].empty()) continue;
    throw StepAbandoned(fmt::format(
        "{}: the optimizer of rank {} has failed in its step(): {}. Parameters of other ranks may be updated: load a "
        "checkpoint, or end the program",
        owner_, group_.world_rank(rank), printable(failures[rank].substr(0, failures[rank].find('\n')))));
  }
  const auto texts = all_gather_text(group_, options_in_words(groups), label);
  const auto first = lines_of(texts.front());
  for (int rank = 1; rank < group_.size(); ++rank) {
    const auto other = lines_of(texts[rank]);
    const auto [ours, theirs] = std::mismatch(first.begin(), first.end(), other.begin(), other.end());
    if (ours == first.end() && theirs == other.end()) continue;
    throw DisagreeError(fmt::format(
        "{}: ranks disagree on the options of a step: rank {} has {}, rank {} has {}; set the same on every rank (a "
        "schedule that looks at the loss, such as ReduceLROnPlateau, needs its mean over ranks)",
        owner_, group_.world_rank(0), ours == first.end() ? "nothing" : *ours, group_.world_rank(rank),
        theirs == other.end() ? "nothing" : *theirs));
  }
}

}  // namespace shoal::python
