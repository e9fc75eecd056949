#include "checkpoint/saving/slice_plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "checkpoint/format/safetensors_format.h"
#include "shoal/error.h"

namespace shoal {
namespace {

using Json = nlohmann::json;

void check(const NamedSlice& slice) {
  const auto fail = [&](const std::string& why) {
    throw UsageError(fmt::format("checkpoint: {}: {}", slice.name.empty() ? "a slice" : slice.name, why));
  };
  if (slice.name.empty()) fail("it has no name");
  if (!is_part_name(slice.part)) fail(fmt::format("part \"{}\": use small letters, digits and _", slice.part));
  if (!slice.values.defined()) fail("its values are undefined");
  if (slice.values.layout() != at::kStrided) fail("its values are sparse; make them dense");
  if (find_safetensors_dtype(slice.values.scalar_type()) == nullptr) {
    fail(fmt::format("safetensors has no dtype {}", c10::toString(slice.values.scalar_type())));
  }
  const auto numel = checked_numel(slice.shape);
  if (numel < 0) fail(fmt::format("shape [{}]", fmt::join(slice.shape, ", ")));
  if (!is_order(slice.order, slice.shape.size())) fail("its order is not a permutation of its dimensions");
  if (slice.range.begin < 0 || slice.range.end < slice.range.begin || slice.range.end > numel) {
    fail(fmt::format("range {}:{} of {} elements", slice.range.begin, slice.range.end, numel));
  }
  if (slice.values.numel() != slice.range.size()) {
    fail(fmt::format("{} values for range {}:{}", slice.values.numel(), slice.range.begin, slice.range.end));
  }
}

struct Offer {
  int rank;
  size_t number;  // index among the rank's slices
  Range range;
};

// Tensor as described by the ranks seen so far.
struct Gathered {
  StoredTensor tensor;
  int first_rank;
  std::vector<Offer> offers;
};

std::string describe(const StoredTensor& tensor) {
  return fmt::format("{} [{}]{}, part {}", c10::toString(tensor.dtype), fmt::join(tensor.shape, ", "),
                     tensor.order.empty() ? "" : fmt::format(" in order [{}]", fmt::join(tensor.order, ", ")),
                     tensor.part);
}

std::map<std::string, Gathered> gather(const std::vector<std::string>& offers) {
  std::map<std::string, Gathered> all;
  for (int rank = 0; rank < static_cast<int>(offers.size()); ++rank) {
    size_t number = 0;
    for (const auto& json : Json::parse(offers[rank])) {
      StoredTensor tensor{.name = json[0],
                          .part = json[1],
                          .dtype = static_cast<at::ScalarType>(json[2].get<int>()),
                          .shape = json[3],
                          .order = json[4]};
      const auto name = tensor.name;
      const auto text = describe(tensor);
      auto& here = all.try_emplace(name, Gathered{std::move(tensor), rank, {}}).first->second;
      if (describe(here.tensor) != text) {
        throw UsageError(fmt::format("checkpoint: {}: rank {} has {}, rank {} {}", name, here.first_rank,
                                     describe(here.tensor), rank, text));
      }
      here.offers.push_back({rank, number++, {json[5], json[6]}});
    }
  }
  return all;
}

[[noreturn]] void missing(const StoredTensor& tensor, const Range& range) {
  throw UsageError(fmt::format("checkpoint: {}: no rank has elements {}:{}", tensor.name, range.begin, range.end));
}

// Assigns each range to one of the ranks that have it. The ranges must cover the tensor, each element once.
void choose(Gathered& gathered, std::vector<int64_t>& load, SlicePlan& plan) {
  auto& [tensor, first_rank, offers] = gathered;
  std::sort(offers.begin(), offers.end(), [](const Offer& a, const Offer& b) {
    return std::tie(a.range.begin, a.range.end, a.rank) < std::tie(b.range.begin, b.range.end, b.rank);
  });
  const auto ranks = static_cast<int>(load.size());
  int64_t end = 0;
  for (size_t i = 0; i < offers.size();) {
    const auto range = offers[i].range;
    if (range.empty() && tensor.numel() > 0) {
      ++i;
      continue;
    }
    if (range.begin < end) {
      throw UsageError(fmt::format("checkpoint: {}: rank {}'s slice {}:{} overlaps another, which ends at {}",
                                   tensor.name, offers[i].rank, range.begin, range.end, end));
    }
    if (range.begin > end) missing(tensor, {end, range.begin});
    const auto* writer = &offers[i];
    for (; i < offers.size() && offers[i].range == range; ++i) {
      if (load[offers[i].rank] < load[writer->rank]) writer = &offers[i];
    }
    load[writer->rank] += range.size() * static_cast<int64_t>(c10::elementSize(tensor.dtype));
    plan.writes[writer->rank].push_back(writer->number);
    tensor.slices.push_back({.file = file_name(tensor.part, writer->rank, ranks), .range = range});
    end = range.end;
  }
  if (end != tensor.numel()) missing(tensor, {end, tensor.numel()});
}

}  // namespace

std::string offer_text(const std::vector<NamedSlice>& slices) {
  auto list = Json::array();
  for (const auto& slice : slices) {
    check(slice);
    list.push_back(Json::array({slice.name, slice.part, static_cast<int>(slice.values.scalar_type()), slice.shape,
                                slice.order, slice.range.begin, slice.range.end}));
  }
  return list.dump();
}

SlicePlan plan_slices(const std::vector<std::string>& offers) {
  auto all = gather(offers);
  // Large ones first, to balance the loads.
  std::vector<Gathered*> order;
  for (auto& [name, gathered] : all) order.push_back(&gathered);
  const auto bytes = [](const Gathered* gathered) {
    return gathered->tensor.numel() * static_cast<int64_t>(c10::elementSize(gathered->tensor.dtype));
  };
  std::stable_sort(order.begin(), order.end(), [&](auto* a, auto* b) { return bytes(a) > bytes(b); });
  std::vector<int64_t> load(offers.size());
  SlicePlan plan{.writes = std::vector<std::vector<size_t>>(offers.size()), .tensors = {}};
  for (auto* gathered : order) {
    choose(*gathered, load, plan);
    plan.tensors.emplace(gathered->tensor.name, std::move(gathered->tensor));
  }
  for (auto& numbers : plan.writes) std::sort(numbers.begin(), numbers.end());
  return plan;
}

std::string file_name(const std::string& part, int rank, int ranks) {
  return ranks == 1 ? fmt::format("{}.safetensors", part)
                    : fmt::format("rank-{:05d}-of-{:05d}.{}.safetensors", rank, ranks, part);
}

}  // namespace shoal
