#include "engine/elastic/shard_source.h"

#include <c10/util/accumulate.h>
#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "comm/group/text.h"
#include "engine/changes/changed_values.h"
#include "memory/views.h"
#include "optim/named_options.h"
#include "shoal/error.h"

namespace shoal {
namespace {

using Json = nlohmann::json;

constexpr const char* subject = "shards";  // for labels and errors
constexpr const char* part = "optimizer";  // whose tensors a MemorySource does not copy
constexpr const char* values_field = "";

std::string slice_name(const std::string& field, const std::string& parameter) {
  return field + '/' + parameter;
}

// Elements in the order of the parameter's memory, whatever its shape.
NamedSlice slice_of(const std::string& field, const ShardSource::Shard& shard, const at::Tensor& tensor) {
  const auto& target = shard.target;
  NamedSlice slice{.name = slice_name(field, shard.name),
                   .shape = {target.parameter.numel()},
                   .range = target.range,
                   .values = in_memory_order(tensor.detach()),
                   .order = {},
                   .part = part};
  if (tensor.numel() == target.range.size()) return slice;
  if (target.range.size() < target.parameter.numel()) {
    throw UsageError(
        fmt::format("Elastic: an element-wise optimizer (shoal::element_wise) keeps {} elements in '{}' for {} of "
                    "parameter {}, which cannot be cut",
                    tensor.numel(), field, target.range.size(), shard.name));
  }
  slice.shape = tensor.sizes().vec();  // of a whole parameter
  slice.range = {0, tensor.numel()};
  return slice;
}

Json ranges_of(const std::vector<ShardSource::Shard>& shards) {
  auto list = Json::array();
  for (const auto& shard : shards) list.push_back({shard.name, shard.target.range.begin, shard.target.range.end});
  return list;
}

// Of values and state.
uint64_t digest_of_all(const ShardSource::Shard& shard) {
  auto digest = digest_of(shard.target.values.detach());
  if (!shard.state) return digest;
  for (const auto& [field, tensor] : shard.state->tensors) digest = digest * 1099511628211U ^ digest_of(tensor);
  return digest;
}

std::string in_words(const std::set<std::string>& names) {
  return names.size() == 1 ? *names.begin()
                           : fmt::format("{} and {} more parameters", *names.begin(), names.size() - 1);
}

// Whether the ranges, in any order, have every element of `wanted`.
bool cover(std::vector<Range> ranges, const Range& wanted) {
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  auto end = wanted.begin;
  for (const auto& range : ranges) {
    if (range.begin <= end) end = std::max(end, range.end);
  }
  return end >= wanted.end;
}

// Gives the shards their values, and `local` their state.
void read_shards(MemorySource& source, const std::vector<ShardSource::Shard>& shards, torch::optim::Optimizer& local) {
  const auto& index = source.index();
  const auto read_range = [&](const StoredTensor& stored, const Range& range, const at::Tensor& to) {
    source.read(stored, range, static_cast<char*>(to.data_ptr()));
  };
  std::map<std::string, std::vector<std::pair<std::string, const StoredTensor*>>> fields;  // by parameter
  for (const auto& [name, stored] : index.tensors) {
    const auto slash = name.find('/');
    if (slash > 0) fields[name.substr(slash + 1)].emplace_back(name.substr(0, slash), &stored);
  }
  for (const auto& shard : shards) {
    const auto& target = shard.target;
    read_range(index.tensors.at(slice_name(values_field, shard.name)), target.range, target.values);
    NamedState state;
    for (const auto& [field, stored] : fields[shard.name]) {
      const auto options = at::TensorOptions(stored->dtype);
      auto& tensor = state.tensors[field];
      if (stored->shape == std::vector<int64_t>{target.parameter.numel()}) {
        tensor = at::empty_strided(target.values.sizes(), dense_strides(target.values), options);
        read_range(*stored, target.range, tensor);
      } else {
        tensor = at::empty(stored->shape, options);
        read_range(*stored, {0, tensor.numel()}, tensor);
      }
    }
    bool exists = !state.tensors.empty();
    for (const auto& rank : index.rank_states) {
      const auto& numbers = rank.at("numbers");
      if (!numbers.contains(shard.name)) continue;
      exists = true;
      state.numbers = numbers_from(numbers.at(shard.name));
    }
    auto* key = target.values.unsafeGetTensorImpl();
    local.state().erase(key);
    if (exists) local.state()[key] = make_state(local, target.param_group, state);
  }
}

}  // namespace

ShardSource::ShardSource(std::vector<Shard> shards) : shards_(std::move(shards)) {
  for (auto& shard : shards_) shard.target.values = shard.target.values.detach();
}

std::set<std::string> ShardSource::lost(const Group& group, const std::vector<Shard>& wanted) const {
  Json own{{"held", ranges_of(shards_)}, {"wanted", ranges_of(wanted)}, {"written", written_}};
  auto& own_digests = own["digests"] = Json::array();
  for (size_t i = 0; i < shards_.size() && !written_; ++i) own_digests.push_back(digest_of_all(shards_[i]));
  std::map<std::string, std::vector<Range>> held, all_wanted;
  std::map<Json, Json> digests;  // by shard
  std::set<std::string> differ;
  bool written = false;
  for (const auto& text : all_gather_text(group, own.dump(), {-1, -1, "shards that are left"})) {
    const auto json = Json::parse(text);
    for (const auto& [list, ranges] : {std::pair(&json.at("held"), &held), {&json.at("wanted"), &all_wanted}}) {
      for (const auto& one : *list) (*ranges)[one.at(0)].push_back({one.at(1), one.at(2)});
    }
    written = written || json.at("written").get<bool>();
    for (size_t i = 0; i < json.at("digests").size(); ++i) {
      const auto& shard = json.at("held").at(i);
      const auto [found, first] = digests.emplace(shard, json.at("digests").at(i));
      if (!first && found->second != json.at("digests").at(i)) differ.insert(shard.at(0));
    }
  }
  if (!written && !differ.empty()) {
    throw JobLost(
        fmt::format("the two owners of shards of {} have different values or optimizer state, which were changed past "
                    "the wrapper since the last step: start "
                    "the job again from its last checkpoint",
                    in_words(differ)));
  }
  std::set<std::string> lost;
  for (const auto& [name, ranges] : all_wanted) {
    for (const auto& range : ranges) {
      if (!cover(held[name], range)) lost.insert(name);
    }
  }
  return lost;
}

// The numbers of a state are the same for all elements of a parameter, which have been updated equally often.
CheckpointContents ShardSource::contents() const {
  CheckpointContents contents;
  auto& numbers = contents.rank_state["numbers"] = Json::object();
  for (const auto& shard : shards_) {
    contents.slices.push_back(slice_of(values_field, shard, shard.target.values));
    if (!shard.state) continue;
    numbers[shard.name] = json_numbers(shard.state->numbers);
    for (const auto& [field, tensor] : shard.state->tensors) contents.slices.push_back(slice_of(field, shard, tensor));
  }
  return contents;
}

void ShardSource::fill(const Group& group, const std::vector<Shard>& wanted, torch::optim::Optimizer& local,
                       const ShardSource* otherwise) const {
  const torch::NoGradGuard no_grad;
  if (const auto names = lost(group, wanted); !names.empty()) {
    if (otherwise != nullptr) return otherwise->fill(group, wanted, local);
    throw JobLost(fmt::format(
        "both ranks that had shards of {} have ended, one before the other's shards had a second owner again: "
        "start the job again from its last checkpoint",
        in_words(names)));
  }
  MemorySource source(group, subject, HeldContents{contents(), group.rank(), group.size()});
  source.together([&] { read_shards(source, wanted, local); });
  source.close();
}

}  // namespace shoal
