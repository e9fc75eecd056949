#pragma once
// Pager: sharded flat tensors that are gathered when an operator uses them, and freed when room is needed.

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

#include "engine/buckets/spare_memory.h"
#include "engine/changes/operator_watch.h"
#include "engine/paging/gather_order.h"
#include "engine/paging/pager_mutex.h"
#include "engine/paging/use_order.h"

namespace shoal {

struct PagerOptions {
  size_t resident = 2;             // pages in use or kept after use; the least recently used is freed first
  size_t ahead = 1;                // additional pages being gathered or waiting for their first use
  std::optional<int64_t> bytes{};  // total bytes of all of them
  // For debugging: compare the order of pages over ranks (DisagreeError from begin), and warn once if a rank's order
  // changes from pass to pass.
  bool check_order = false;
};

// Source of a page on this rank.
struct PageSource {
  std::string name;  // for labels and errors
  at::Tensor own;  // this rank's shard, an equal part of the page, contiguous; with a root: the full page, on the root
  int root = -1;   // rank of the group that owns the full page; -1: every rank owns a shard
  std::function<void(const at::Tensor& page)> written{};  // see Pager::store_writes
  std::function<void(const at::Tensor& page)> stored{};   // called when `own` has taken the page's values
};

// A page is a flat tensor whose memory is allocated and freed while the tensor and its views keep their identity.
// Before an operator uses any of them, the page is gathered (unsharded) from the ranks' shards. It remains in memory
// until others need the room, at least to the end of the operator. Parameters can therefore be read anywhere, in
// forward or backward, by any thread. Access past the operators (data_ptr) to a page without memory throws an error
// that names the remedy, and so does an operator that needs more pages than may be in memory (UsageError). Writes of
// operators to a page are stored in this rank's shard before the page is freed; all ranks must write the same values.
//
// Residency is a cache: correctness never depends on the order of uses. If ranks use pages in the same order pass after
// pass, pages are gathered ahead of use (gather_order.h).
class Pager : private MemoryUser {
 public:
  using Pass = GatherOrder::Pass;
  struct Statistics {
    int64_t gathers = 0;
    size_t peak_pages = 0;  // maximum number in memory at once, including those being gathered
    int64_t peak_bytes = 0;
  };

  // Collective: creates a group for the gathers.
  Pager(const Group& group, PagerOptions options);
  // Sharded pages remain sharded: their tensors can no longer be read.
  ~Pager() override;
  Pager(const Pager&) = delete;
  Pager& operator=(const Pager&) = delete;

  // Adds a sharded page of `numel` elements; returns its tensor [numel].
  at::Tensor add(int64_t numel, const at::TensorOptions& options, PageSource source);

  // References to a page's storage that the pager has itself.
  static constexpr size_t uses_of_a_page = 1;
  // Leaves the page's storage with its values to the tensors that have it, as ordinary memory, and returns the page's
  // tensor [numel] in another. Collective.
  at::Tensor leave_to_holders(const at::Tensor& former);

  // begin: a forward starts. end: a backward or an evaluation has ended. Collective.
  void begin(Pass pass);
  void end();
  // Reshards the page, because its shards have changed and the gathered values are out of date.
  void invalidate(const at::Tensor& page);
  // True if an operator has written the page since forget_writes().
  bool written(const at::Tensor& page) const;
  // Stores writes to the page in this rank's shard; PageSource::written is called with the full page. Happens
  // automatically before a page is freed.
  void store_writes(const at::Tensor& page);
  void forget_writes(const at::Tensor& page);
  // Removes PageSource::written and stored, whose owner has been destroyed.
  void forget_writer(const at::Tensor& page);
  // While off, writes are not detected, and are lost.
  void notice_writes(bool on) { notices_ = on; }
  // While set, pages remain in memory regardless of the limit.
  void set_limit_ignored(bool ignored);
  // To be called by ranks behind passes that others do not make, and by those: takes part in the gathers of the former,
  // until all have called it. Collective.
  void meet();
  // To be called before this rank changes its shards. Returns when all ranks have called it; until then other ranks can
  // gather pages with the old values. Collective.
  void update();
  // Unshards all pages except `but`, by name. If `stay` is set, they remain in memory until reshard_all(). Collective.
  void unshard_all(bool stay = true, const std::set<std::string>& but = {});
  // Reshards the pages held by unshard_all(). `store`: this rank's shards take their current values.
  void reshard_all(bool store);
  const Statistics& statistics() const { return statistics_; }
  // Of the gathers.
  const Group& group() const { return group_; }

 private:
  enum class State { sharded, gathering, unsharded };
  struct Page {
    PageSource source;
    c10::Storage storage;
    at::TensorOptions options;
    int64_t numel = 0;
    State state = State::sharded;
    bool used = false;  // used since it was gathered
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
  at::Tensor make_tensor(size_t index);
  void store(Page& page);
  void store_own(const Page& page) const;
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
  static void point_to_memory(Page& page);
  void count();
  void check_order(Pass pass);
  void reshard_unused();
  void reshard(size_t index);

  PagerOptions options_;
  Group group_;
  GatherOrder order_;
  std::atomic<bool> notices_ = true;
  mutable PagerMutex mutex_;  // guards everything below
  std::vector<std::unique_ptr<Page>> pages_;
  std::unordered_map<c10::StorageImpl*, size_t> index_;
  std::list<size_t> used_;         // unsharded and used, least recently used first
  std::vector<size_t> unsharded_;  // pages of unshard_all()
  int64_t largest_ = 0;            // bytes of the largest page
  size_t ahead_ = 0;               // number of pages in memory or being gathered that were not used yet
  bool limit_ignored_ = false;
  UseOrder uses_;  // with check_order
  bool warned_ = false;
  SpareMemory spare_;
  Statistics statistics_;
};

}  // namespace shoal
