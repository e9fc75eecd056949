#include "engine/sharded/parameter_buffer.h"

#include <torch/utils.h>

#include "memory/other_memory.h"
#include "memory/views.h"

namespace shoal {
namespace {

// A tensor like `parameter` on `memory` [numel], whose operators can be watched, with a storage of its own.
at::Tensor home_of(const at::Tensor& memory, const at::Tensor& parameter) {
  const auto bytes = static_cast<int64_t>(memory.nbytes());
  auto home = at::empty({0}, memory.options());
  home.set_(c10::Storage(c10::Storage::use_byte_size_t(), bytes, pointer_to(memory), /*allocator=*/nullptr,
                         /*resizable=*/false),
            0, parameter.sizes(), dense_strides(parameter));
  return watchable(home);
}

// The values as they lie in `home`, [numel].
at::Tensor values_like(const at::Tensor& home, const at::Tensor& parameter) {
  if (parameter.strides() == home.strides() && parameter.is_non_overlapping_and_dense()) {
    return in_memory_order(parameter);
  }
  auto values = at::empty_strided(home.sizes(), home.strides(), parameter.options().requires_grad(false));
  return in_memory_order(values.copy_(parameter));
}

}  // namespace

ParameterBuffer::ParameterBuffer(const Group& group, std::vector<at::Tensor> parameters, FlatLayout layout,
                                 std::vector<Range> owners, const HostSharedBufferOptions& options, const Label& label)
    : layout_(std::move(layout)),
      memory_(group.allocate_host_shared(layout_.size(), parameters.front().options().requires_grad(false),
                                         std::move(owners), options)),
      own_(memory_.owners()[group.rank()]),
      writes_(parameters.size()),
      private_(parameters.size()) {
  const torch::NoGradGuard no_grad;
  for (size_t piece = 0; piece < parameters.size(); ++piece) {
    homes_.push_back(home_of(part(layout_.range(piece)), parameters[piece]));
    places_.push_back(homes_.back().storage().data());
    const auto mine = layout_.range(piece).intersect(own_);
    if (mine.empty()) continue;
    part(mine).copy_(
        in_memory_order(parameters[piece]).narrow(0, mine.begin - layout_.range(piece).begin, mine.size()));
  }
  publish(label);
  wait(label);
  for (size_t piece = 0; piece < parameters.size(); ++piece) {
    parameters[piece].set_data(homes_[piece]);
    shoal::watch(homes_[piece].storage().unsafeGetStorageImpl(), *this, Watched::writes);
  }
  watch_ = ParameterWatch(std::move(parameters));
}

ParameterBuffer::~ParameterBuffer() {
  const torch::NoGradGuard no_grad;
  for (size_t piece = 0; piece < homes_.size(); ++piece) {
    unwatch(homes_[piece].storage().unsafeGetStorageImpl(), *this);
    const auto& parameter = parameters()[piece];
    const bool used_elsewhere = parameter.use_count() > 1;
    if (!used_elsewhere || !same_view(parameter, homes_[piece])) continue;
    parameter.set_data(moved(piece) ? view_like(homes_[piece], 0, parameter) : at::clone(parameter.detach()));
  }
}

void ParameterBuffer::publish(const Label& label) {
  memory_.publish(++version_, label);
}

void ParameterBuffer::wait(const Label& label) {
  memory_.wait_published(version_, label);
  const std::lock_guard lock(mutex_);
  for (size_t piece = 0; piece < homes_.size(); ++piece) {
    if (moved(piece) && !writes_.contains(piece)) refresh(piece);
  }
}

void ParameterBuffer::refresh(size_t piece) {
  const torch::NoGradGuard no_grad;
  const UnwatchedOperators own;
  in_memory_order(homes_[piece]).copy_(part(layout_.range(piece)));
}

void ParameterBuffer::take_own(size_t piece) {
  const torch::NoGradGuard no_grad;
  const UnwatchedOperators own;
  const auto range = layout_.range(piece);
  const auto mine = range.intersect(own_);
  if (mine.empty()) return;
  part(mine).copy_(in_memory_order(homes_[piece]).narrow(0, mine.begin - range.begin, mine.size()));
}

void ParameterBuffer::take_moved() {
  for (size_t piece = 0; piece < homes_.size(); ++piece) {
    if (moved(piece)) take_own(piece);
  }
}

void ParameterBuffer::leave_moved() {
  const std::lock_guard lock(mutex_);
  for (size_t piece = 0; piece < homes_.size(); ++piece) {
    if (!moved(piece) || writes_.contains(piece)) continue;
    give_other_memory(homes_[piece], part(layout_.range(piece)));
    places_[piece] = homes_[piece].storage().data();
  }
}

void ParameterBuffer::set_place(size_t piece, const at::Tensor& memory) {
  auto* storage = homes_[piece].storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(pointer_to(memory));
  places_[piece] = storage->data();
}

void ParameterBuffer::before_write(std::string_view, c10::StorageImpl* storage) {
  if (!writes_.notices() && !shared()) return;
  const UnwatchedOperators own;
  const std::lock_guard lock(mutex_);
  for (size_t piece = 0; piece < homes_.size(); ++piece) {
    if (homes_[piece].storage().unsafeGetStorageImpl() != storage) continue;
    if (shared()) make_private(piece);
    if (writes_.notices()) writes_.note(piece, homes_[piece]);
    return;
  }
}

void ParameterBuffer::make_private(size_t piece) {
  if (private_[piece] || moved(piece)) return;
  set_place(piece, part(layout_.range(piece)).clone());
  private_[piece] = true;
}

void ParameterBuffer::leave_to_holders() {
  const torch::NoGradGuard no_grad;
  const UnwatchedOperators own;
  for (const auto piece : changed()) {
    auto& home = homes_[piece];
    if (same_view(parameters()[piece], home) || home.storage().use_count() == 1) continue;
    const std::lock_guard lock(mutex_);
    make_private(piece);
    unwatch(home.storage().unsafeGetStorageImpl(), *this);
    home = home_of(part(layout_.range(piece)), home);
    places_[piece] = home.storage().data();
    shoal::watch(home.storage().unsafeGetStorageImpl(), *this, Watched::writes);
    private_[piece] = false;
  }
}

void ParameterBuffer::make_private() {
  const std::lock_guard lock(mutex_);
  for (size_t piece = 0; piece < homes_.size(); ++piece) make_private(piece);
}

void ParameterBuffer::end_private(bool keep) {
  const torch::NoGradGuard no_grad;
  const UnwatchedOperators own;
  const std::lock_guard lock(mutex_);
  for (size_t piece = 0; piece < homes_.size(); ++piece) {
    const bool elsewhere = moved(piece);
    if (keep && (private_[piece] || elsewhere)) take_own(piece);
    point_to_buffer(piece);
    if (!keep && elsewhere) refresh(piece);
  }
}

std::vector<size_t> ParameterBuffer::changed() const {
  std::vector<size_t> list;
  if (!writes_.any() && !watch_.changed()) return list;
  const std::lock_guard lock(mutex_);
  for (size_t piece = 0; piece < homes_.size(); ++piece) {
    const bool replaced = !same_view(parameters()[piece], homes_[piece]);
    if (replaced || writes_.contains(piece)) list.push_back(piece);
  }
  return list;
}

void ParameterBuffer::forget_undone() {
  if (!writes_.any()) return;
  const UnwatchedOperators own;
  const std::lock_guard lock(mutex_);
  const auto in_place = [&](size_t piece) { return same_view(parameters()[piece], homes_[piece]) && !moved(piece); };
  for (const auto piece : writes_.forget_undone(homes_, in_place)) point_to_buffer(piece);
}

void ParameterBuffer::point_to_buffer(size_t piece) {
  if (!private_[piece]) return;
  private_[piece] = false;
  if (!moved(piece)) {
    set_place(piece, part(layout_.range(piece)));
  }
}

void ParameterBuffer::bind(size_t piece) {
  point_to_buffer(piece);
  if (!same_view(parameters()[piece], homes_[piece])) parameters()[piece].set_data(homes_[piece]);
}

at::Tensor ParameterBuffer::current(size_t piece, const Range& elements) const {
  return values_like(homes_[piece], parameters()[piece]).narrow(0, elements.begin, elements.size());
}

void ParameterBuffer::adopt(const Label& label) {
  const torch::NoGradGuard no_grad;
  const UnwatchedOperators own;
  const auto pieces = changed();
  for (const auto piece : pieces) {
    const auto range = layout_.range(piece);
    const auto mine = range.intersect(own_);
    const auto& parameter = parameters()[piece];
    const bool in_place = !private_[piece] && !moved(piece) && same_view(parameter, homes_[piece]);
    if (mine.empty() || in_place) continue;
    part(mine).copy_(values_like(homes_[piece], parameter).narrow(0, mine.begin - range.begin, mine.size()));
  }
  publish(label);
  wait(label);
  bind_all(pieces);
}

void ParameterBuffer::adopt_alone() {
  const torch::NoGradGuard no_grad;
  const UnwatchedOperators own;
  const auto pieces = changed();
  for (const auto piece : pieces) {
    const auto& parameter = parameters()[piece];
    if (moved(piece) || !same_view(parameter, homes_[piece])) {
      part(layout_.range(piece)).copy_(values_like(homes_[piece], parameter));
    }
  }
  bind_all(pieces);
}

void ParameterBuffer::bind_all(const std::vector<size_t>& pieces) {
  const std::lock_guard lock(mutex_);
  for (const auto piece : pieces) {
    bind(piece);
    if (moved(piece)) refresh(piece);
    watch_.note(piece);
  }
  writes_.forget_all();
}

}  // namespace shoal
