#include "engine/checkpoint/equal_values.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "shoal/error.h"

namespace shoal {
namespace {

constexpr int64_t blocks = 16;
constexpr int64_t elements_of_block = 16;  // a cache line of float32

struct Sample {
  std::string name;
  at::Tensor elements;  // float32
  double most_apart;    // of the largest element, as after different processors' rounding
};

double rounding_of(at::ScalarType dtype) {
  constexpr double units = 4;
  if (dtype == at::kBFloat16) return units * static_cast<double>(std::numeric_limits<c10::BFloat16>::epsilon());
  if (dtype == at::kHalf) return units * static_cast<double>(std::numeric_limits<c10::Half>::epsilon());
  return 1e-4;
}

// Some elements, evenly spread in memory: all of them take about as long to read as a save takes to copy them.
Sample sample_of(const std::string& name, const at::Tensor& values) {
  const auto detached = values.detach();
  const auto flat =
      detached.is_non_overlapping_and_dense() ? detached.as_strided({detached.numel()}, {1}) : detached.reshape({-1});
  std::vector<at::Tensor> parts;
  for (int64_t block = 0; block < blocks; ++block) {
    const auto begin = flat.numel() * block / blocks;
    const auto end = std::min(flat.numel() * (block + 1) / blocks, begin + elements_of_block);
    if (end > begin) parts.push_back(flat.narrow(0, begin, end - begin));
  }
  const auto some = at::cat(parts).cpu();
  const auto numbers = some.is_complex() ? at::view_as_real(some).reshape({-1}) : some;
  return {name, numbers.to(at::kFloat).nan_to_num(), rounding_of(values.scalar_type())};
}

std::vector<Sample> samples_of(const CheckpointView& view) {
  std::vector<Sample> samples;
  for (const auto& share : view.shares) {
    if (!share.everywhere) continue;
    for (const auto& piece : share.pieces) {
      if (!piece.updated.defined() || view.own.contains(piece.name)) continue;
      const auto values = piece.values();
      if (values.layout() != at::kStrided || values.numel() == 0) continue;
      samples.push_back(sample_of(piece.name, values));
    }
  }
  return samples;
}

}  // namespace

void require_equal_values(const CheckpointView& view, const Group& group) {
  const auto everywhere = [](const auto& share) { return share.everywhere; };
  if (group.size() == 1 || std::none_of(view.shares.begin(), view.shares.end(), everywhere)) return;
  const auto samples = samples_of(view);
  if (samples.empty()) return;
  std::vector<at::Tensor> all;
  for (const auto& sample : samples) all.push_back(sample.elements);
  const auto own = at::cat(all);
  auto most = at::stack({own, -own});
  group.all_reduce(most, ReduceOp::max, {-1, -1, "parameters that a checkpoint has once"}).wait();
  int64_t begin = 0;
  for (const auto& sample : samples) {
    const auto numel = sample.elements.numel();
    const auto largest = most[0].narrow(0, begin, numel), least = -most[1].narrow(0, begin, numel);
    begin += numel;
    const auto apart = (largest - least).max().item<double>();
    const auto scale = at::maximum(largest.abs(), least.abs()).max().item<double>();
    if (apart <= sample.most_apart * scale) continue;
    throw DisagreeError(fmt::format(
        "a checkpoint of this training has each parameter once, but ranks have different values of {}, up to "
        "{:.3g} apart: give LocalUpdates or DecentralizedDataParallel itself to TrainingState; elsewhere make "
        "parameters and optimizer state equal again, by a broadcast of rank 0's",
        sample.name, apart));
  }
}

}  // namespace shoal
