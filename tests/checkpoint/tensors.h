#pragma once
// Random tensors, and random divisions of them into ranks' slices; the same on all ranks for one seed.

#include <torch/types.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "checkpoint/format/named_slice.h"

namespace shoal::test {

struct Whole {
  std::string name;
  at::Tensor tensor;  // contiguous
  std::vector<int64_t> order{};
  std::string part = "model";
};

// Random bits, which include NaNs, infinities and denormals; 0 and 1 for bool.
inline at::Tensor random_tensor(std::mt19937& random, std::vector<int64_t> shape, at::ScalarType dtype) {
  auto tensor = at::empty(shape, dtype);
  auto* bytes = static_cast<uint8_t*>(tensor.data_ptr());
  std::generate_n(bytes, tensor.nbytes(),
                  [&] { return static_cast<uint8_t>(random() & (dtype == at::kBool ? 1 : 255)); });
  return tensor;
}

inline std::vector<Whole> random_wholes(uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<Whole> list;
  const auto add = [&](std::string name, std::vector<int64_t> shape, at::ScalarType dtype,
                       std::vector<int64_t> order = {}, std::string part = "model") {
    list.push_back(
        {std::move(name), random_tensor(random, std::move(shape), dtype), std::move(order), std::move(part)});
  };
  add("scalar", {}, at::kFloat);
  add("empty", {0, 3}, at::kFloat);
  add("one", {1}, at::kLong);
  add("fc.weight", {37, 11}, at::kFloat);
  add("large", {900, 1000}, at::kFloat);  // several blocks of checksums
  add("half", {129}, at::kHalf);
  add("bfloat", {5, 7, 3}, at::kBFloat16);
  add("double", {64}, at::kDouble);
  add("complex", {17}, at::kComplexFloat);
  add("bytes", {1000}, at::kByte);
  add("flags", {100}, at::kBool);
  add("conv.weight", {6, 5, 3, 2}, at::kFloat, {0, 2, 3, 1});
  add("odd order", {4, 3, 5}, at::kInt, {2, 0, 1});
  add("optimizer/fc.weight/exp_avg", {37, 11}, at::kFloat, {}, "optimizer");
  return list;
}

// All elements, in the tensor's order.
inline at::Tensor in_order(const Whole& whole) {
  return whole.order.empty() ? whole.tensor.reshape({-1}) : whole.tensor.permute(whole.order).contiguous().view({-1});
}

// Slices of rank `rank` of `ranks`: every tensor is cut at random places, and each piece is given to one or two random
// ranks.
inline std::vector<NamedSlice> random_slices(const std::vector<Whole>& wholes, int rank, int ranks, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<NamedSlice> slices;
  for (const auto& whole : wholes) {
    const auto numel = whole.tensor.numel();
    std::vector<int64_t> cuts{0, numel};
    const auto pieces = random() % 4;
    for (unsigned i = 0; i < pieces; ++i) cuts.push_back(static_cast<int64_t>(random() % (numel + 1)));
    std::sort(cuts.begin(), cuts.end());
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      const int owner = static_cast<int>(random() % ranks);
      const int second = random() % 3 == 0 ? static_cast<int>(random() % ranks) : owner;
      if (rank != owner && rank != second) continue;
      slices.push_back({.name = whole.name,
                        .shape = whole.tensor.sizes().vec(),
                        .range = {cuts[i], cuts[i + 1]},
                        .values = in_order(whole).narrow(0, cuts[i], cuts[i + 1] - cuts[i]),
                        .order = whole.order,
                        .part = whole.part});
    }
  }
  return slices;
}

inline std::vector<NamedSlice> whole_slices(const std::vector<Whole>& wholes) {
  std::vector<NamedSlice> slices;
  for (const auto& whole : wholes) slices.push_back(whole_slice(whole.name, whole.tensor, whole.part));
  return slices;
}

inline bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  const auto x = a.contiguous();
  const auto y = b.contiguous();
  return x.scalar_type() == y.scalar_type() && x.sizes() == y.sizes() &&
         (x.nbytes() == 0 || std::memcmp(x.data_ptr(), y.data_ptr(), x.nbytes()) == 0);
}

}  // namespace shoal::test
