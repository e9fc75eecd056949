#include "engine/checkpoint/equal_values.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "optim/state.h"
#include "shoal/error.h"

namespace shoal {
namespace {

constexpr int64_t blocks = 16;
constexpr int64_t elements_of_block = 16;  // a cache line of float32
constexpr double most_of_rounding = 1e-4;  // of a tensor's largest element

struct Sample {
  std::string name;
  at::Tensor elements;  // float32
};

// Some elements, evenly spread: all of them take about as long to read as a save takes to copy them.
void add_sample(std::vector<Sample>& samples, const std::string& name, const at::Tensor& values) {
  if (values.layout() != at::kStrided || values.numel() == 0) return;  // a layout is refused later, by name
  const auto flat = values.detach().reshape({-1});
  std::vector<at::Tensor> parts;
  for (int64_t block = 0; block < blocks; ++block) {
    const auto begin = flat.numel() * block / blocks;
    const auto end = std::min(flat.numel() * (block + 1) / blocks, begin + elements_of_block);
    if (end > begin) parts.push_back(flat.narrow(0, begin, end - begin));
  }
  const auto real = at::cat(parts).cpu();
  const auto numbers = real.is_complex() ? at::view_as_real(real).reshape({-1}) : real;
  samples.push_back({name, numbers.to(at::kFloat).nan_to_num()});
}

std::vector<Sample> samples_of(const CheckpointView& view) {
  std::vector<Sample> samples;
  for (const auto& share : view.shares) {
    if (!share.everywhere) continue;
    for (const auto& piece : share.pieces) {
      if (!piece.updated.defined() || view.own.contains(piece.name)) continue;
      add_sample(samples, piece.name, piece.updated);
      const auto found = share.local->state().find(piece.updated.unsafeGetTensorImpl());
      if (found == share.local->state().end()) continue;
      for (const auto& [field, tensor] : named_state(*found->second).tensors) {
        add_sample(samples, fmt::format("{} of {}", field, piece.name), tensor);
      }
    }
  }
  return samples;
}

}  // namespace

void require_equal_values(const CheckpointView& view, const Group& group) {
  const auto everywhere = [](const auto& share) { return share.everywhere; };
  if (group.size() == 1 || std::none_of(view.shares.begin(), view.shares.end(), everywhere)) return;
  const std::string subject = "checkpoint of a training whose ranks hold equal values";
  const auto samples = samples_of(view);
  std::vector<std::string> lines;
  std::vector<at::Tensor> all;
  for (const auto& sample : samples) {
    lines.push_back(fmt::format("{} elements looked at of {}", sample.elements.numel(), sample.name));
    all.push_back(sample.elements);
  }
  agree(group, subject, lines);
  if (all.empty()) return;
  const auto own = at::cat(all);
  auto most = at::stack({own, -own});
  group.all_reduce(most, ReduceOp::max, {-1, -1, subject}).wait();
  int64_t begin = 0;
  for (const auto& sample : samples) {
    const auto numel = sample.elements.numel();
    const auto largest = most[0].narrow(0, begin, numel), least = -most[1].narrow(0, begin, numel);
    begin += numel;
    const auto apart = (largest - least).max().item<double>();
    const auto scale = at::maximum(largest.abs(), least.abs()).max().item<double>();
    if (apart <= most_of_rounding * scale) continue;
    throw DisagreeError(
        fmt::format("{}: ranks have different values of {}, up to {:.3g} apart: give LocalUpdates or "
                    "DecentralizedDataParallel itself to TrainingState; elsewhere make the values equal again",
                    subject, sample.name, apart));
  }
}

}  // namespace shoal
