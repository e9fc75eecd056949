#pragma once
// Flat parameter memory that comes when an operator takes it and goes when room is needed.

#include <torch/types.h>

#include <atomic>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/paging/gather_order.h"
#include "engine/paging/operator_watch.h"
#include "engine/paging/use_order.h"
#include "engine/reducer/spare_memory.h"

namespace shoal {

struct PagerOptions {
  size_t resident = 2;             // pages in use, and that stay after use, least recently used out first
  size_t ahead = 1;                // further pages on their way or waiting for their first use
  std::optional<int64_t> bytes{};  // of all of them together
  // For debugging: ranks whose order of pages differs are told the first difference (DisagreeError from begin), and a
  // rank whose order changes from pass to pass warns once.
  bool check_order = false;
};

// What a page is on this rank.
struct PageSource {
  std::string name;  // for labels and errors
  at::Tensor own;    // this rank's equal part of the page, contiguous; with a root: the page, on the root
  int root = -1;     // the rank of the group that has all of it; -1: every rank has its part
  std::function<void(const at::Tensor& page)> written{};  // see Pager::store_writes
};

// A page is a flat tensor whose memory comes and goes while the tensor, and all views of it, keep their identity.
// Before an operator takes any of them the page is gathered from the ranks' parts; then it stays until others need the
// room, at least to the operator's end. So anything may be read anywhere, forward or backward, by any thread. What is
// read past the operators (data_ptr) while the page is away is an error that says so, and so is an operator that needs
// more pages than may be in memory (UsageError). What operators write to a page is stored in this rank's part before the
// page goes; all ranks must write the same.
//
// Residency is a cache: correctness never depends on the order of uses. Where ranks use pages in the same order pass
// after pass, pages are gathered ahead of use (gather_order.h).
class Pager : private MemoryUser {
 public:
  using Pass = GatherOrder::Pass;
  struct Statistics {
    int64_t gathers = 0;
    size_t peak_pages = 0;  // in memory at one time, those on their way included
    int64_t peak_bytes = 0;
  };

  // Collective: makes a group of its own for the gathers.
  Pager(const Group& group, PagerOptions options);
  // Pages that are away stay away: their tensors can no longer be read.
  ~Pager() override;
  Pager(const Pager&) = delete;
  Pager& operator=(const Pager&) = delete;

  // A new page of `numel` elements, away. Its tensor: [numel].
  at::Tensor add(int64_t numel, const at::TensorOptions& options, PageSource source);

  // A forward begins, a backward or an evaluation has ended. Collective.
  void begin(Pass pass);
  void end();
  // The page's parts have changed: what is in memory is not valid any more.
  void invalidate(const at::Tensor& page);
  // Whether an operator has written the page since forget_writes().
  bool written(const at::Tensor& page) const;
  // This rank's part gets what was written to the page; PageSource::written is called with the whole page. Happens by
  // itself before the page goes.
  void store_writes(const at::Tensor& page);
  void forget_writes(const at::Tensor& page);
  // Whoever was to be told of writes to the page has gone.
  void forget_writer(const at::Tensor& page);
  // While off, nothing is noticed of writes, and they are lost.
  void notice_writes(bool on) { notices_ = on; }
  // While set, pages stay whatever the limit.
  void keep(bool all);
  // This rank's parts are about to change. Comes back when all ranks have called it; those that read pages until then
  // read what the parts are now. Collective.
  void update();
  // Brings all pages but some, by name. Where they are to `stay`, they do until reshard_all. Collective.
  void unshard_all(bool stay = true, const std::set<std::string>& but = {});
  // Lets those go that stay; `store`: what they hold now counts, for this rank's parts.
  void reshard_all(bool store);
  const Statistics& statistics() const { return statistics_; }

 private:
  enum class State { sharded, gathering, unsharded };
  struct Page {
    PageSource source;
    c10::Storage storage;
    at::TensorOptions options;
    int64_t numel = 0;
    State state = State::sharded;
    bool used = false;  // since it came
    int users = 0;
    bool written = false;  // since forget_writes()
    bool dirty = false;    // written, and not stored yet
    at::Tensor memory{};
    Work work{};

    int64_t bytes() const { return static_cast<int64_t>(storage.nbytes()); }
  };

  void begin_use(std::string_view op, std::span<c10::StorageImpl* const> memory) override;
  void before_write(std::string_view op, c10::StorageImpl* memory) override;
  void end_use(std::span<c10::StorageImpl* const> memory) noexcept override;
  void store(Page& page);
  Page& page_of(const at::Tensor& page) const;
  void require_room(std::string_view op, std::span<c10::StorageImpl* const> memory) const;
  void unuse(std::span<c10::StorageImpl* const> memory);
  int64_t bytes_in_use() const;
  bool too_many(size_t pages, int64_t bytes) const;
  void unshard(size_t index);
  void finish(Page& page);
  void start(size_t index);
  void gather_for_others(size_t index);
  void help_others();
  Work gather(Page& page, const at::Tensor& room);
  void fetch_ahead();
  void make_room(const Page* next);
  void free_memory(Page& page);
  void count();
  void check_order(Pass pass);
  void reshard_unused();
  void reshard(size_t index);

  PagerOptions options_;
  Group group_;
  GatherOrder order_;
  std::atomic<bool> notices_ = true;
  mutable std::mutex mutex_;  // everything below
  std::vector<std::unique_ptr<Page>> pages_;
  std::unordered_map<c10::StorageImpl*, size_t> index_;
  std::list<size_t> used_;         // in memory and used, least recently first
  std::vector<size_t> unsharded_;  // by unshard_all
  int64_t largest_ = 0;            // bytes of a page
  size_t ahead_ = 0;               // in memory or on their way, not used yet
  bool keep_ = false;
  UseOrder uses_;  // with check_order
  bool warned_ = false;
  SpareMemory spare_;
  Statistics statistics_;
};

}  // namespace shoal
