#include "engine/checkpoint/equal_values.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/sharded/changed_values.h"
#include "optim/state.h"

namespace shoal {
namespace {

void add_line(std::vector<std::string>& lines, const std::string& name, const at::Tensor& values) {
  if (values.layout() != at::kStrided) return;  // refused later, by name
  lines.push_back(fmt::format("{} with values of digest {:016x}", name, digest_of(values)));
}

}  // namespace

void require_equal_values(const CheckpointView& view, const Group& group) {
  const auto everywhere = [](const auto& share) { return share.everywhere; };
  if (group.size() == 1 || std::none_of(view.shares.begin(), view.shares.end(), everywhere)) return;
  std::vector<std::string> lines;
  for (const auto& share : view.shares) {
    if (!share.everywhere) continue;
    for (const auto& piece : share.pieces) {
      if (!piece.updated.defined() || view.own.contains(piece.name)) continue;
      add_line(lines, piece.name, piece.updated);
      const auto found = share.local->state().find(piece.updated.unsafeGetTensorImpl());
      if (found == share.local->state().end()) continue;
      for (const auto& [field, tensor] : named_state(*found->second).tensors) {
        add_line(lines, fmt::format("{} of {}", field, piece.name), tensor);
      }
    }
  }
  agree(group,
        "checkpoint of a training whose ranks hold equal values (give LocalUpdates or DecentralizedDataParallel itself "
        "to "
        "TrainingState; elsewhere make the values equal again)",
        lines);
}

}  // namespace shoal
