// Chunks of a guarded update: saved, changed, restored.

#include <c10/util/accumulate.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <utility>

#include "engine/elastic/guarded_update.h"
#include "memory/views.h"
#include "shoal/error.h"

namespace shoal {
namespace {

// An optimizer of which a step() concerns one tensor. The destructor gives it back its parameters.
class SingledOut {
 public:
  explicit SingledOut(torch::optim::Optimizer& optimizer) : optimizer_(optimizer) {
    for (auto& group : optimizer_.param_groups()) parameters_.push_back(std::exchange(group.params(), {}));
  }
  ~SingledOut() {
    for (size_t i = 0; i < parameters_.size(); ++i) optimizer_.param_groups()[i].params() = std::move(parameters_[i]);
  }
  SingledOut(const SingledOut&) = delete;
  SingledOut& operator=(const SingledOut&) = delete;

  void step(size_t param_group, const at::Tensor& piece) {
    auto& parameters = optimizer_.param_groups()[param_group].params();
    parameters = {piece};
    optimizer_.step();
    parameters.clear();
  }

 private:
  torch::optim::Optimizer& optimizer_;
  std::vector<std::vector<at::Tensor>> parameters_;
};

// The others see what was written before only then, and the compiler moves nothing across.
void write_mark(std::atomic<int64_t>& mark, int64_t value) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  mark.store(value, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

}  // namespace

// The elements of a target that are changed at once.
int64_t GuardedUpdate::whole(const UpdateTarget& target) const {
  return element_wise_ ? std::min(chunk_numel, target.values.numel()) : target.values.numel();
}

std::vector<GuardedUpdate::Chunk> GuardedUpdate::chunks(int rank) const {
  std::vector<Chunk> list;
  const auto& targets = shared_.targets()[static_cast<size_t>(rank)];
  for (size_t i = 0; i < targets.size(); ++i) {
    const auto& inputs = shared_.inputs(rank, i);
    if (!inputs.has_others && !is_updated_in(inputs)) continue;
    const auto numel = targets[i].values.numel();
    const auto step = std::max<int64_t>(1, whole(targets[i]));
    int64_t begin = 0;
    do {
      const auto end = std::min(numel, begin + step);
      list.push_back({i, begin, end, end == numel});
      begin = end;
    } while (begin < numel);
  }
  return list;
}

bool GuardedUpdate::is_whole(int rank, const Chunk& chunk) const {
  return chunk.end - chunk.begin == target(rank, chunk).values.numel();
}

void GuardedUpdate::require_elements(const UpdateTarget& target, int64_t numel) {
  if (numel == target.values.numel()) return;
  throw UsageError(
      fmt::format("Elastic: an element-wise optimizer (shoal::element_wise) keeps {} elements for a parameter of {}",
                  numel, target.values.numel()));
}

// A tensor that lies as the target's values do, as it is if one chunk has all of it, and flat otherwise.
at::Tensor GuardedUpdate::prepared(int rank, const Chunk& chunk, const at::Tensor& tensor) const {
  if (is_whole(rank, chunk)) return tensor.detach();
  require_elements(target(rank, chunk), tensor.numel());
  return in_memory_order(tensor);
}

// The chunk's elements of a prepared tensor.
at::Tensor GuardedUpdate::part(int rank, const Chunk& chunk, const at::Tensor& tensor) const {
  return is_whole(rank, chunk) ? tensor : tensor.narrow(0, chunk.begin, chunk.end - chunk.begin);
}

// Calls `copy` with the place and size of all that the chunk changes. No tensors: they would take longer than the
// bytes.
template <class Copy>
void GuardedUpdate::for_each_saved(int rank, const Chunk& chunk, const Copy& copy) const {
  const bool whole = is_whole(rank, chunk);
  const auto add = [&](void* data, int64_t numel, size_t element) {
    if (!whole) require_elements(target(rank, chunk), numel);
    const auto begin = static_cast<size_t>(whole ? 0 : chunk.begin);
    const auto count = static_cast<size_t>(whole ? numel : chunk.end - chunk.begin);
    copy(static_cast<std::byte*>(data) + begin * element, count * element);
  };
  const auto& values = target(rank, chunk).values;
  add(values.data_ptr(), values.numel(), values.element_size());
  const auto& entry = shared_.entry(rank, chunk.target);
  for (int f = 0; entry.exists && f < entry.tensors; ++f) {
    const auto& field = entry.fields[f];
    const auto numel = c10::multiply_integers(at::IntArrayRef(field.sizes, static_cast<size_t>(field.dims)));
    add(shared_.slot_data(rank, chunk.target, f), numel, c10::elementSize(static_cast<at::ScalarType>(field.dtype)));
  }
}

// The entry comes first, because it says which tensors follow.
void GuardedUpdate::save(int rank, const Chunk& chunk) const {
  auto* to = shared_.scratch(rank);
  std::memcpy(to, &shared_.entry(rank, chunk.target), sizeof(StateEntry));
  to += sizeof(StateEntry);
  for_each_saved(rank, chunk, [&](const std::byte* data, size_t bytes) {
    std::memcpy(to, data, bytes);
    to += bytes;
  });
}

void GuardedUpdate::restore(int rank, const Chunk& chunk) const {
  const auto* from = shared_.scratch(rank);
  std::memcpy(&shared_.entry(rank, chunk.target), from, sizeof(StateEntry));
  from += sizeof(StateEntry);
  for_each_saved(rank, chunk, [&](std::byte* data, size_t bytes) {
    std::memcpy(data, from, bytes);
    from += bytes;
  });
}

// What lies like the target's values in the rank's memory.
at::Tensor GuardedUpdate::read(int rank, const Chunk& chunk, const shm::Place& place) const {
  const auto& values = target(rank, chunk).values;
  return at::from_blob(survivors_.at(rank, place), values.sizes(), dense_strides(values), values.options());
}

at::Tensor GuardedUpdate::gradient(int rank, const Chunk& chunk) const {
  if (rank == group_.rank()) return gradients_[chunk.target].read;
  return read(rank, chunk, shared_.inputs(rank, chunk.target).gradient);
}

at::Tensor GuardedUpdate::others(int rank, const Chunk& chunk) const {
  const auto& inputs = shared_.inputs(rank, chunk.target);
  if (!inputs.has_others) return {};
  return rank == group_.rank() ? others_[chunk.target] : read(rank, chunk, inputs.others);
}

GuardedUpdate::Prepared GuardedUpdate::tensors_of(int rank, const Chunk& chunk) const {
  const auto& inputs = shared_.inputs(rank, chunk.target);
  Prepared all{.values = prepared(rank, chunk, target(rank, chunk).values)};
  if (inputs.has_others) all.others = prepared(rank, chunk, others(rank, chunk));
  if (!is_updated_in(inputs)) return all;
  all.gradient = prepared(rank, chunk, gradient(rank, chunk));
  all.state = shared_.state(rank, chunk.target);
  if (all.state) {
    for (auto& [name, tensor] : all.state->tensors) tensor = prepared(rank, chunk, tensor);
  }
  return all;
}

void GuardedUpdate::step(int rank, const Chunk& chunk, const Prepared& all) {
  auto piece = part(rank, chunk, all.values);
  if (all.others.defined()) {
    GossipTerm::mix(piece, part(rank, chunk, all.others), shared_.inputs(rank, chunk.target).own);
  }
  if (!all.gradient.defined()) return round(rank, chunk, piece);
  piece.mutable_grad() = part(rank, chunk, all.gradient);
  if (all.state) {
    auto state = *all.state;
    for (auto& [name, tensor] : state.tensors) tensor = part(rank, chunk, tensor);
    local_.state()[piece.unsafeGetTensorImpl()] = make_state(local_, target(rank, chunk).param_group, state);
  }
  SingledOut(local_).step(target(rank, chunk).param_group, piece);
  keep_state(rank, chunk, piece);
  round(rank, chunk, piece);
}

void GuardedUpdate::round(int rank, const Chunk& chunk, const at::Tensor& piece) const {
  const auto& rounded = target(rank, chunk).rounded;
  if (!rounded.defined()) return;
  rounded.narrow(0, chunk.begin, chunk.end - chunk.begin).copy_(in_memory_order(piece.detach()));
}

// Moves what the optimizer has made into the slots. The state of a target counts once its last chunk is done.
void GuardedUpdate::keep_state(int rank, const Chunk& chunk, const at::Tensor& piece) {
  const auto found = local_.state().find(piece.unsafeGetTensorImpl());
  if (found == local_.state().end()) return;
  const auto named = named_state(*found->second);
  local_.state().erase(found);
  const bool whole = is_whole(rank, chunk);
  std::vector<SharedState::Described> fields;
  int fresh = 0;
  for (const auto& [name, tensor] : named.tensors) {
    const int field = shared_.field_of(rank, chunk.target, name, fresh);
    const auto begin = static_cast<size_t>(whole ? 0 : chunk.begin) * tensor.element_size();
    const bool in_place = shared_.slot_data(rank, chunk.target, field) + begin == tensor.const_data_ptr();
    if (in_place && !chunk.last) continue;
    auto sizes = whole ? tensor.sizes().vec() : target(rank, chunk).values.sizes().vec();
    if (!in_place) {
      const auto slot = shared_.slot(rank, chunk.target, field, tensor.scalar_type(), sizes);
      part(rank, chunk, prepared(rank, chunk, slot)).copy_(tensor);
    }
    fields.push_back({field, name, tensor.scalar_type(), std::move(sizes)});
  }
  if (chunk.last) shared_.describe(rank, chunk.target, fields, named.numbers);
}

void GuardedUpdate::update(int rank) {
  auto& record = shared_.record(rank);
  if (record.update.load() != commits_) {
    write_mark(record.mark, 0);
    write_mark(record.update, commits_);
  }
  const auto list = chunks(rank);
  auto mark = record.mark.load();
  if (mark % 2 == 1) {
    restore(rank, list[static_cast<size_t>(mark / 2)]);
    write_mark(record.mark, --mark);
  }
  std::optional<size_t> of;
  Prepared all;
  for (auto k = mark / 2; k < static_cast<int64_t>(list.size()); ++k) {
    const auto& chunk = list[static_cast<size_t>(k)];
    if (of != chunk.target) all = tensors_of(rank, chunk);
    of = chunk.target;
    save(rank, chunk);
    write_mark(record.mark, 2 * k + 1);
    step(rank, chunk, all);
    write_mark(record.mark, 2 * k + 2);
    if (all.gradient.defined() && chunk.last && rank == group_.rank()) take_state(chunk.target);
  }
  record.updated.store(commits_);
  survivors_.ring();
}

}  // namespace shoal
