#include "checkpoint/loading/memory_source.h"

#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>
#include <cstring>
#include <exception>

#include "checkpoint/on_all_ranks.h"
#include "checkpoint/saving/slice_plan.h"
#include "comm/group/text.h"
#include "shoal/error.h"

namespace shoal {
namespace {

using Json = nlohmann::json;

constexpr const char* optimizer_part = "optimizer";

constexpr const char* slices_entry = "slices";
constexpr const char* rank_entry = "rank";
constexpr const char* ranks_entry = "ranks";
constexpr const char* own_entry = "own";
constexpr const char* global_entry = "global";
constexpr const char* step_entry = "step";
constexpr const char* strategy_entry = "strategy";

std::string describe(const HeldContents& held) {
  const auto& contents = held.contents;
  Json json = {{slices_entry, Json::parse(offer_text(contents.slices))},
               {rank_entry, held.rank},
               {ranks_entry, held.ranks},
               {own_entry, contents.rank_state}};
  if (held.rank == 0) {
    json[global_entry] = contents.global_state;
    json[step_entry] = contents.step;
    json[strategy_entry] = contents.strategy;
  }
  return json.dump();
}

int64_t element_bytes_of(const StoredTensor& tensor) {
  return static_cast<int64_t>(c10::elementSize(tensor.dtype));
}

at::Tensor bytes_at(const char* data, int64_t size) {
  return at::from_blob(const_cast<char*>(data), {size}, at::kByte);
}

}  // namespace

MemorySource::MemorySource(const Group& group, const std::string& name, const std::optional<HeldContents>& held,
                           int64_t portion_bytes)
    : group_(group), name_(name), portion_bytes_(portion_bytes) {
  const torch::NoGradGuard no_grad;
  std::string own;
  on_all_ranks(group_, name_, [&] {
    if (held) own = describe(*held);
  });
  const auto descriptions = all_gather_text(group_, own, {-1, -1, "slices of " + name_});
  SlicePlan plan;
  on_all_ranks(group_, name_, [&] {
    std::vector<std::string> offers;
    for (const auto& text : descriptions) {
      offers.push_back(text.empty() ? "[]" : Json::parse(text).at(slices_entry).dump());
    }
    plan = plan_slices(offers);
    fill_index(descriptions);
  });
  index_.tensors = std::move(plan.tensors);
  for (const auto& [tensor_name, tensor] : index_.tensors) {
    numbers_[tensor_name] = static_cast<int64_t>(tensors_.size());
    tensors_.push_back(&tensor);
    for (int rank = 0; rank < group_.size(); ++rank) owners_[file_name(tensor.part, rank, group_.size())] = rank;
  }
  if (held) keep(held->contents, plan.writes[group_.rank()]);
}

void MemorySource::fill_index(const std::vector<std::string>& descriptions) {
  for (const auto& text : descriptions) {
    if (text.empty()) continue;
    const auto json = Json::parse(text);
    index_.world_size = json.at(ranks_entry);
    index_.rank_states.resize(static_cast<size_t>(index_.world_size));
    const auto rank = json.at(rank_entry).get<size_t>();
    index_.rank_states.at(rank) = json.at(own_entry);
    if (rank > 0) continue;
    index_.global_state = json.at(global_entry);
    index_.step = json.at(step_entry);
    index_.strategy = json.at(strategy_entry);
  }
}

void MemorySource::keep(const CheckpointContents& contents, const std::vector<size_t>& numbers) {
  for (const auto number : numbers) {
    const auto& slice = contents.slices[number];
    auto values = slice.values.detach();
    const bool private_already = slice.part == optimizer_part && values.is_cpu() && values.is_contiguous();
    if (!private_already) values = at::empty(values.sizes(), at::TensorOptions(values.scalar_type())).copy_(values);
    held_[slice.name].push_back({slice.range, std::move(values)});
  }
}

const char* MemorySource::own_bytes(const std::string& tensor, int64_t element) const {
  for (const auto& held : held_.at(tensor)) {
    if (!held.range.contains(element)) continue;
    return static_cast<const char*>(held.values.const_data_ptr()) +
           (element - held.range.begin) * held.values.element_size();
  }
  throw UsageError(fmt::format("{}: this rank does not hold element {} of {}", name_, element, tensor));
}

int MemorySource::owner_of(const StoredTensor& tensor, const Range& range) const {
  for (const auto& slice : tensor.slices) {
    if (slice.range.contains(range.begin)) return owners_.at(slice.file);
  }
  throw UsageError(fmt::format("{}: no rank holds element {} of {}", name_, range.begin, tensor.name));
}

void MemorySource::read(const StoredTensor& tensor, const Range& range, char* to) {
  const auto element = element_bytes_of(tensor);
  const auto portion = std::max<int64_t>(1, portion_bytes_ / element);
  for (const auto& slice : tensor.slices) {
    const auto wanted = range.intersect(slice.range);
    if (wanted.empty()) continue;
    char* destination = to + (wanted.begin - range.begin) * element;
    if (owners_.at(slice.file) == group_.rank()) {
      std::memcpy(destination, own_bytes(tensor.name, wanted.begin), static_cast<size_t>(wanted.size() * element));
      continue;
    }
    for (auto begin = wanted.begin; begin < wanted.end; begin += portion) {
      const Range here{begin, std::min(begin + portion, wanted.end)};
      round({numbers_.at(tensor.name), here}, destination + (begin - wanted.begin) * element);
    }
  }
}

std::vector<MemorySource::Request> MemorySource::round(const Request& own, char* to) {
  auto mine = at::tensor({own.tensor, own.range.begin, own.range.end}, at::kLong);
  auto all = at::empty({3 * group_.size()}, at::kLong);
  group_.all_gather(all, mine, {-1, -1, "what ranks read of " + name_}).wait();
  const auto* numbers = all.const_data_ptr<int64_t>();
  std::vector<Request> requests;
  for (int rank = 0; rank < group_.size(); ++rank, numbers += 3) {
    requests.push_back({numbers[0], {numbers[1], numbers[2]}});
  }
  std::vector<Work> works;
  for (int rank = 0; rank < group_.size(); ++rank) {
    const auto& request = requests[rank];
    if (request.tensor < 0) continue;
    const auto& tensor = *tensors_.at(static_cast<size_t>(request.tensor));
    const auto owner = owner_of(tensor, request.range);
    const auto size = request.range.size() * element_bytes_of(tensor);
    const Label label{-1, -1, fmt::format("{} of {}", tensor.name, name_)};
    if (owner == group_.rank()) {
      works.push_back(group_.send(bytes_at(own_bytes(tensor.name, request.range.begin), size), rank, /*tag=*/0, label));
    } else if (rank == group_.rank()) {
      works.push_back(group_.recv(bytes_at(to, size), owner, /*tag=*/0, label));
      received_ += size;
    }
  }
  for (auto& work : works) work.wait();
  return requests;
}

void MemorySource::together(const std::function<void()>& work) {
  // Whatever happens here, others may need slices of this rank.
  std::exception_ptr failure;
  try {
    work();
  } catch (const CommError&) {
    throw;
  } catch (const std::exception&) {
    failure = std::current_exception();
  }
  const auto idle = [](const Request& request) { return request.tensor < 0; };
  while (true) {
    const auto requests = round({nothing}, nullptr);
    if (std::all_of(requests.begin(), requests.end(), idle)) break;
  }
  if (failure) std::rethrow_exception(failure);
}

void MemorySource::close() {
  round({closed}, nullptr);
}

void MemorySource::serve() {
  const auto over = [](const Request& request) { return request.tensor == closed || request.tensor == serves; };
  while (true) {
    const auto requests = round({serves}, nullptr);
    if (std::all_of(requests.begin(), requests.end(), over)) break;
  }
}

}  // namespace shoal
