#include "engine/paging/pager.h"

#include <c10/util/ScopeExit.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/utils.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>

#include "memory/views.h"
#include "shoal/error.h"
#include "shoal/group.h"
#include "shoal/telemetry.h"

namespace shoal {
namespace {

Group same_ranks(const Group& group) {
  std::vector<int> ranks(group.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return group.subgroup(ranks);
}

// Records in the trace that an operator uses a page, perhaps after a wait.
void mark_use(const Group& group, const std::string& name) {
  auto* timeline = timeline_of(group);
  if (timeline == nullptr) return;
  const auto now = Clock::now();
  timeline->add({.category = "unit", .name = name, .group = {}, .label = {}, .begin = now, .end = now});
}

}  // namespace

Pager::Pager(const Group& group, PagerOptions options) : options_(options), group_(same_ranks(group)), order_(group_) {}

Pager::~Pager() {
  for (const auto& [storage, index] : index_) {
    unwatch(storage, *this);
    // Without memory on every rank, so that all of them refuse to use it.
    storage->set_data_ptr_noswap(c10::DataPtr(nullptr, pages_[index]->options.device()));
    storage->release_data_and_set_meta_custom_data_ptr_error_msg_(
        fmt::format("{} was sharded by a FullyShardedDataParallel that has been destroyed: call its unwrap(), which "
                    "restores the module's parameters, or full_state_dict() before",
                    pages_[index]->source.name));
  }
}

at::Tensor Pager::add(int64_t numel, const at::TensorOptions& options, PageSource source) {
  const std::lock_guard lock(mutex_);
  auto page = std::make_unique<Page>();
  const auto bytes = numel * static_cast<int64_t>(options.dtype().itemsize());
  largest_ = std::max(largest_, bytes);
  page->source = std::move(source);
  page->options = options.requires_grad(false);
  page->numel = numel;
  pages_.push_back(std::move(page));
  return make_tensor(pages_.size() - 1);
}

// The page's tensor, in a storage of its own, sharded.
at::Tensor Pager::make_tensor(size_t index) {
  auto& page = *pages_[index];
  const auto bytes = page.numel * static_cast<int64_t>(page.options.dtype().itemsize());
  page.storage = c10::Storage(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(nullptr, page.options.device()),
                              /*allocator=*/nullptr, /*resizable=*/false);
  auto flat = at::empty({0}, page.options);
  flat.set_(page.storage, 0, {page.numel}, {1});
  flat = watchable(flat);
  free_memory(page);
  auto* storage = page.storage.unsafeGetStorageImpl();
  index_[storage] = index;
  watch(storage, *this);
  return flat;
}

at::Tensor Pager::leave_to_holders(const at::Tensor& former) {
  const std::lock_guard lock(mutex_);
  const torch::NoGradGuard no_grad;
  auto* storage = former.storage().unsafeGetStorageImpl();
  const auto index = index_.at(storage);
  auto& page = *pages_[index];
  reshard(index);
  const auto memory = at::empty({page.numel}, page.options);
  gather(page, memory).wait();
  storage->set_data_ptr_noswap(pointer_to(memory));
  storage->clear_data_ptr_access_error_msg_();
  unwatch(storage, *this);
  index_.erase(storage);
  return make_tensor(index);
}

// PyTorch moves a storage's memory in place where another process gets it, which then has the values of that moment.
void Pager::point_to_memory(Page& page) {
  auto* storage = page.storage.unsafeGetStorageImpl();
  if (storage->data() != page.memory.data_ptr()) storage->set_data_ptr_noswap(pointer_to(page.memory));
}

// Frees the page's memory; its tensors stay.
void Pager::free_memory(Page& page) {
  store(page);
  if (page.memory.defined()) spare_.put(std::exchange(page.memory, {}));
  auto* storage = page.storage.unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, page.options.device()));
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(
      fmt::format("{} is sharded and not in memory on this rank: operators gather it automatically; use data_ptr() "
                  "within a summon_full_params() scope (in Python also numpy() and copy.deepcopy(), or of its clone())",
                  page.source.name));
  page.state = State::sharded;
  page.used = false;
}

Work Pager::gather(Page& page, const at::Tensor& room) {
  store(page);
  const auto memory = room.narrow(0, 0, page.numel);
  const Label label{-1, -1, page.source.name};
  if (page.source.root < 0) return group_.all_gather(memory, page.source.own, label);
  if (page.source.root == group_.rank()) memory.copy_(page.source.own);
  return group_.broadcast(memory, page.source.root, label);
}

void Pager::start(size_t index) {
  auto& page = *pages_[index];
  page.memory = spare_.take(group_, page.numel, page.options);
  page.work = gather(page, page.memory);
  page.state = State::gathering;
  ++ahead_;
  ++statistics_.gathers;
  count();
}

void Pager::gather_for_others(size_t index) {
  auto& page = *pages_[index];
  auto memory = spare_.take(group_, page.numel, page.options);
  ++statistics_.gathers;
  gather(page, memory).wait();
  spare_.put(std::move(memory));
}

void Pager::finish(Page& page) {
  if (page.state != State::gathering) return;
  page.work.wait();
  auto* storage = page.storage.unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(pointer_to(page.memory));
  storage->clear_data_ptr_access_error_msg_();
  page.state = State::unsharded;
}

void Pager::count() {
  size_t pages = 0;
  int64_t bytes = 0;
  for (const auto& page : pages_) {
    if (page->state == State::sharded) continue;
    ++pages;
    bytes += static_cast<int64_t>(page->memory.nbytes());
  }
  statistics_.peak_pages = std::max(statistics_.peak_pages, pages);
  statistics_.peak_bytes = std::max(statistics_.peak_bytes, bytes);
}

void Pager::unshard(size_t index) {
  auto& page = *pages_[index];
  if (options_.check_order) uses_.use(index);
  if (page.used) {
    used_.remove(index);
    used_.push_back(index);
    return;
  }
  mark_use(group_, page.source.name);
  order_.missed(index);
  make_room(&page);
  while (page.state == State::sharded) {
    const auto next = *order_.next(index);
    if (next == index) {
      start(index);
    } else {
      gather_for_others(next);
    }
  }
  finish(page);
  --ahead_;
  page.used = true;
  used_.push_back(index);
  fetch_ahead();
}

// Limit of bytes for pages in use.
int64_t Pager::bytes_in_use() const {
  return options_.bytes ? *options_.bytes - largest_ * static_cast<int64_t>(options_.ahead)
                        : std::numeric_limits<int64_t>::max();
}

bool Pager::too_many(size_t pages, int64_t bytes) const {
  return pages > options_.resident || bytes > bytes_in_use();
}

// Makes room for `next`, or enforces the limit if there is none. Never frees a page that an operator is using.
void Pager::make_room(const Page* next) {
  if (limit_ignored_) return;
  int64_t bytes = next == nullptr ? 0 : next->bytes();
  for (const auto index : used_) bytes += pages_[index]->bytes();
  for (auto place = used_.begin(); place != used_.end();) {
    if (!too_many(used_.size() + (next == nullptr ? 0 : 1), bytes)) return;
    auto& page = *pages_[*place];
    if (page.users > 0) {
      ++place;
      continue;
    }
    bytes -= page.bytes();
    free_memory(page);
    place = used_.erase(place);
  }
}

void Pager::fetch_ahead() {
  while (ahead_ < options_.ahead) {
    const auto next = order_.ahead();
    if (!next) return;
    if (pages_[*next]->state == State::sharded) {
      start(*next);
    } else {
      gather_for_others(*next);
    }
  }
}

void Pager::begin_use(std::string_view op, std::span<c10::StorageImpl* const> memory) {
  const std::lock_guard lock(mutex_);
  const torch::NoGradGuard no_grad;
  require_room(op, memory);
  for (auto* storage : memory) ++pages_[index_.at(storage)]->users;
  auto unpin = c10::make_scope_exit([&] { unuse(memory); });
  for (auto* storage : memory) {
    auto& page = *pages_[index_.at(storage)];
    unshard(index_.at(storage));
    point_to_memory(page);
  }
  unpin.release();
}

void Pager::before_write(std::string_view, c10::StorageImpl* memory) {
  if (!notices_) return;
  const std::lock_guard lock(mutex_);
  auto& page = *pages_[index_.at(memory)];
  page.written = page.dirty = true;
}

void Pager::store(Page& page) {
  if (!std::exchange(page.dirty, false) || page.state != State::unsharded) return;
  const torch::NoGradGuard no_grad;
  store_own(page);
  if (page.source.written) page.source.written(page.memory.narrow(0, 0, page.numel));
}

void Pager::store_own(const Page& page) const {
  if (page.source.own.defined()) {
    const auto numel = page.source.own.numel();
    page.source.own.copy_(page.memory.narrow(0, page.source.root < 0 ? numel * group_.rank() : 0, numel));
  }
  if (page.source.stored) page.source.stored(page.memory.narrow(0, 0, page.numel));
}

Pager::Page& Pager::page_of(const at::Tensor& page) const {
  return *pages_[index_.at(page.storage().unsafeGetStorageImpl())];
}

bool Pager::written(const at::Tensor& page) const {
  const std::lock_guard lock(mutex_);
  return page_of(page).written;
}

void Pager::store_writes(const at::Tensor& page) {
  const std::lock_guard lock(mutex_);
  store(page_of(page));
}

void Pager::forget_writes(const at::Tensor& page) {
  const std::lock_guard lock(mutex_);
  page_of(page).written = page_of(page).dirty = false;
}

void Pager::forget_writer(const at::Tensor& page) {
  const std::lock_guard lock(mutex_);
  page_of(page).source.written = page_of(page).source.stored = nullptr;
}

void Pager::end_use(std::span<c10::StorageImpl* const> memory) noexcept {
  const std::lock_guard lock(mutex_);
  unuse(memory);
}

void Pager::unuse(std::span<c10::StorageImpl* const> memory) {
  for (auto* storage : memory) --pages_[index_.at(storage)]->users;
}

// The pages of a unit count once. Pages that an operator already uses need no more room.
void Pager::require_room(std::string_view op, std::span<c10::StorageImpl* const> memory) const {
  if (limit_ignored_) return;
  std::set<std::string> units;
  int64_t bytes = 0;
  for (auto* storage : memory) {
    const auto& page = *pages_[index_.at(storage)];
    if (page.users > 0) continue;
    units.insert(page.source.name);
    bytes += page.bytes();
  }
  if (!too_many(units.size(), bytes)) return;
  throw UsageError(
      fmt::format("{} takes the parameters of {} units at once, {} bytes in total: {}; at most {} units may be in "
                  "use{}. Raise unit_limit or byte_limit, or use a summon_full_params() scope",
                  op, units.size(), bytes, fmt::join(units, ", "), options_.resident,
                  options_.bytes ? fmt::format(", with {} bytes", bytes_in_use()) : ""));
}

void Pager::reshard(size_t index) {
  auto& page = *pages_[index];
  if (page.state == State::sharded) return;
  if (page.used) {
    used_.remove(index);
  } else {
    finish(page);
    --ahead_;
  }
  free_memory(page);
}

void Pager::invalidate(const at::Tensor& page) {
  const std::lock_guard lock(mutex_);
  reshard(index_.at(page.storage().unsafeGetStorageImpl()));
}

void Pager::set_limit_ignored(bool ignored) {
  const std::lock_guard lock(mutex_);
  limit_ignored_ = ignored;
  make_room(nullptr);
}

}  // namespace shoal
