// Chunks of a guarded update: saved, changed, restored.

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cstring>
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
  return cuts_ ? std::min(chunk_numel, target.values.numel()) : target.values.numel();
}

std::vector<GuardedUpdate::Chunk> GuardedUpdate::chunks(int rank) const {
  std::vector<Chunk> list;
  const auto& targets = shared_.targets()[static_cast<size_t>(rank)];
  for (size_t i = 0; i < targets.size(); ++i) {
    if (!shared_.gradient(rank, i).present) continue;
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

// The chunk's elements of a tensor that lies as the target's values do.
at::Tensor GuardedUpdate::part(int rank, const Chunk& chunk, const at::Tensor& tensor) const {
  if (is_whole(rank, chunk)) return tensor.detach();
  if (tensor.numel() != target(rank, chunk).values.numel()) {
    throw UsageError(
        fmt::format("Elastic: an element-wise optimizer (shoal::element_wise) keeps {} elements for a "
                    "parameter of {}",
                    tensor.numel(), target(rank, chunk).values.numel()));
  }
  return in_memory_order(tensor.detach()).narrow(0, chunk.begin, chunk.end - chunk.begin);
}

std::vector<at::Tensor> GuardedUpdate::saved_tensors(int rank, const Chunk& chunk) const {
  std::vector<at::Tensor> tensors{part(rank, chunk, target(rank, chunk).values)};
  const auto& entry = shared_.entry(rank, chunk.target);
  for (int f = 0; entry.exists && f < entry.tensors; ++f) {
    const auto& field = entry.fields[f];
    const auto slot = shared_.slot(rank, chunk.target, f, static_cast<at::ScalarType>(field.dtype),
                                   at::IntArrayRef(field.sizes, static_cast<size_t>(field.dims)));
    tensors.push_back(part(rank, chunk, slot));
  }
  return tensors;
}

// The entry comes first, because it says which tensors follow.
void GuardedUpdate::save(int rank, const Chunk& chunk) const {
  auto* to = shared_.scratch(rank);
  std::memcpy(to, &shared_.entry(rank, chunk.target), sizeof(StateEntry));
  to += sizeof(StateEntry);
  for (const auto& tensor : saved_tensors(rank, chunk)) {
    std::memcpy(to, tensor.const_data_ptr(), tensor.nbytes());
    to += tensor.nbytes();
  }
}

void GuardedUpdate::restore(int rank, const Chunk& chunk) const {
  const auto* from = shared_.scratch(rank);
  std::memcpy(&shared_.entry(rank, chunk.target), from, sizeof(StateEntry));
  from += sizeof(StateEntry);
  for (const auto& tensor : saved_tensors(rank, chunk)) {
    std::memcpy(tensor.data_ptr(), from, tensor.nbytes());
    from += tensor.nbytes();
  }
}

at::Tensor GuardedUpdate::gradient(int rank, const Chunk& chunk) const {
  if (rank == group_.rank()) return part(rank, chunk, gradients_[chunk.target].read);
  const auto& values = target(rank, chunk).values;
  auto* data = survivors_.at(rank, shared_.gradient(rank, chunk.target).place);
  return part(rank, chunk, at::from_blob(data, values.sizes(), dense_strides(values), values.options()));
}

void GuardedUpdate::step(int rank, const Chunk& chunk) {
  auto piece = part(rank, chunk, target(rank, chunk).values);
  piece.mutable_grad() = gradient(rank, chunk);
  if (auto state = shared_.state(rank, chunk.target)) {
    for (auto& [name, tensor] : state->tensors) tensor = part(rank, chunk, tensor);
    local_.state()[piece.unsafeGetTensorImpl()] = make_state(local_, *state);
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
  std::vector<SharedState::Described> fields;
  int fresh = 0;
  for (const auto& [name, tensor] : named.tensors) {
    const int field = shared_.field_of(rank, chunk.target, name, fresh);
    auto sizes = is_whole(rank, chunk) ? tensor.sizes().vec() : target(rank, chunk).values.sizes().vec();
    const auto slot = part(rank, chunk, shared_.slot(rank, chunk.target, field, tensor.scalar_type(), sizes));
    if (slot.const_data_ptr() != tensor.const_data_ptr()) slot.copy_(tensor);
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
  for (auto k = mark / 2; k < static_cast<int64_t>(list.size()); ++k) {
    const auto& chunk = list[static_cast<size_t>(k)];
    save(rank, chunk);
    write_mark(record.mark, 2 * k + 1);
    step(rank, chunk);
    write_mark(record.mark, 2 * k + 2);
    if (chunk.last && rank == group_.rank()) take_state(chunk.target);
  }
  record.updated.store(commits_);
  survivors_.ring();
}

}  // namespace shoal
