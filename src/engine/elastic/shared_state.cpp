#include "engine/elastic/shared_state.h"

#include <fmt/format.h>
#include <torch/utils.h>

#include <algorithm>
#include <cstring>
#include <string_view>

#include "memory/views.h"
#include "shoal/error.h"

namespace shoal {
namespace {

constexpr int64_t alignment = 128;
constexpr int64_t most_element_bytes = 8;

// Lays out parts of a file, one after the other.
class Places {
 public:
  int64_t take(int64_t bytes) {
    const auto begin = end_;
    end_ += (bytes + alignment - 1) / alignment * alignment;
    return begin;
  }
  int64_t end() const { return end_; }

 private:
  int64_t end_ = 0;
};

int64_t bytes_per_element(const at::Tensor& values) {
  return std::max<int64_t>(most_element_bytes, values.element_size());
}

void write_name(char (&to)[StateEntry::name_bytes], const std::string& name) {
  if (name.size() >= StateEntry::name_bytes) {
    throw UsageError(fmt::format("Elastic: the optimizer's state '{}' has a name of more than {} characters", name,
                                 StateEntry::name_bytes - 1));
  }
  std::memcpy(to, name.c_str(), name.size() + 1);
}

}  // namespace

SharedState::SharedState(const Group& group, UpdateTargets targets, int64_t scratch_numel)
    : targets_(std::move(targets)) {
  Places places;
  for (const auto& list : targets_) {
    Part part;
    const auto count = static_cast<int64_t>(list.size());
    part.record = places.take(sizeof(UpdateRecord));
    part.inputs = places.take(count * static_cast<int64_t>(sizeof(UpdateInputs)));
    part.entries = places.take(count * static_cast<int64_t>(sizeof(StateEntry)));
    int64_t scratch = sizeof(StateEntry) + alignment;
    ranks_.push_back(part);
    const int rank = static_cast<int>(ranks_.size()) - 1;
    for (size_t target = 0; target < list.size(); ++target) {
      const auto bytes = slot_bytes(rank, target);
      ranks_.back().slots.push_back(places.take(StateEntry::most_tensors * bytes));
      const auto saved = std::min(list[target].values.numel(), scratch_numel) * bytes_per_element(list[target].values);
      scratch = std::max(scratch, (1 + StateEntry::most_tensors) * (saved + alignment) + 2 * alignment +
                                      static_cast<int64_t>(sizeof(StateEntry)));
    }
    ranks_.back().scratch = places.take(scratch);
  }
  const auto buffer = group.allocate_host_shared(places.end(), at::kByte, std::vector<Range>(targets_.size()));
  if (!buffer.shared()) throw UsageError("Elastic: a sharded optimizer needs the transport host, on one host");
  memory_ = buffer.tensor();
  data_ = static_cast<std::byte*>(memory_.data_ptr());
}

int64_t SharedState::slot_bytes(int rank, size_t target) const {
  const auto& values = targets_[static_cast<size_t>(rank)][target].values;
  const auto bytes = std::max<int64_t>(1, values.numel()) * bytes_per_element(values);
  return (bytes + alignment - 1) / alignment * alignment;
}

UpdateRecord& SharedState::record(int rank) const {
  return *reinterpret_cast<UpdateRecord*>(at(ranks_[static_cast<size_t>(rank)].record));
}

UpdateInputs& SharedState::inputs(int rank, size_t target) const {
  return reinterpret_cast<UpdateInputs*>(at(ranks_[static_cast<size_t>(rank)].inputs))[target];
}

StateEntry& SharedState::entry(int rank, size_t target) const {
  return reinterpret_cast<StateEntry*>(at(ranks_[static_cast<size_t>(rank)].entries))[target];
}

at::Tensor SharedState::slot(int rank, size_t target, int field, at::ScalarType dtype, at::IntArrayRef sizes) const {
  const auto& values = targets_[static_cast<size_t>(rank)][target].values;
  const auto room = slot_bytes(rank, target);
  const auto options = at::TensorOptions(dtype);
  int64_t numel = 1;
  for (const auto size : sizes) numel *= size;
  if (numel * static_cast<int64_t>(c10::elementSize(dtype)) > room) {
    throw UsageError(
        fmt::format("Elastic: an optimizer's state of {} elements is larger than 8 bytes per element of its "
                    "parameter, which is not supported",
                    numel));
  }
  auto* data = slot_data(rank, target, field);
  const auto keep = [memory = memory_](void*) {};
  if (sizes == values.sizes()) return at::from_blob(data, sizes, dense_strides(values), keep, options);
  return at::from_blob(data, sizes, keep, options);
}

std::optional<NamedState> SharedState::state(int rank, size_t target) const {
  const auto& entry = this->entry(rank, target);
  if (!entry.exists) return std::nullopt;
  NamedState named;
  for (int f = 0; f < entry.tensors; ++f) {
    const auto& field = entry.fields[f];
    named.tensors[field.name] =
        slot(rank, target, f, static_cast<at::ScalarType>(field.dtype), at::IntArrayRef(field.sizes, field.dims));
  }
  for (int n = 0; n < entry.numbers; ++n) named.numbers[entry.values[n].name] = entry.values[n].value;
  return named;
}

int SharedState::field_of(int rank, size_t target, const std::string& name, int& fresh) const {
  const auto& entry = this->entry(rank, target);
  const int known = entry.exists ? entry.tensors : 0;
  for (int field = 0; field < known; ++field) {
    if (std::string_view(entry.fields[field].name) == name) return field;
  }
  const int field = known + fresh++;
  if (field < StateEntry::most_tensors) return field;
  throw UsageError(
      fmt::format("Elastic: the optimizer keeps more than {} tensors per parameter, which is not supported",
                  StateEntry::most_tensors));
}

void SharedState::describe(int rank, size_t target, const std::vector<Described>& fields,
                           const std::map<std::string, double>& numbers) const {
  auto& entry = this->entry(rank, target);
  if (numbers.size() > StateEntry::most_numbers) {
    throw UsageError(fmt::format("Elastic: the optimizer keeps {} numbers per parameter, and at most {} are supported",
                                 numbers.size(), StateEntry::most_numbers));
  }
  for (const auto& described : fields) {
    if (described.field >= static_cast<int>(fields.size())) {
      throw UsageError("Elastic: the optimizer has dropped a tensor of a parameter's state, which is not supported");
    }
    auto& field = entry.fields[described.field];
    if (described.sizes.size() > StateEntry::most_dims) {
      throw UsageError(fmt::format("Elastic: the optimizer's state '{}' has more than {} dimensions", described.name,
                                   StateEntry::most_dims));
    }
    write_name(field.name, described.name);
    field.dtype = static_cast<int32_t>(described.dtype);
    field.dims = static_cast<int32_t>(described.sizes.size());
    std::copy(described.sizes.begin(), described.sizes.end(), field.sizes);
  }
  int count = 0;
  for (const auto& [name, value] : numbers) {
    write_name(entry.values[count].name, name);
    entry.values[count++].value = value;
  }
  entry.tensors = static_cast<int32_t>(fields.size());
  entry.numbers = count;
  entry.exists = true;
}

void SharedState::keep(int rank, size_t target, const NamedState& state) const {
  std::vector<Described> fields;
  int fresh = 0;
  for (const auto& [name, tensor] : state.tensors) {
    const int field = field_of(rank, target, name, fresh);
    slot(rank, target, field, tensor.scalar_type(), tensor.sizes()).copy_(tensor);
    fields.push_back({field, name, tensor.scalar_type(), tensor.sizes().vec()});
  }
  describe(rank, target, fields, state.numbers);
}

}  // namespace shoal
