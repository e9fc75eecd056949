#pragma once
// Order of collective gathers: all ranks agree on the next page, although each rank knows only what its own graph will
// read.

#include <deque>
#include <optional>
#include <vector>

#include "shoal/group.h"

namespace shoal {

// A pass is a forward with its backward, or a forward without gradients. Gathers are collective; ranks agree on each of
// them in one of two ways:
//   script   the pages that all ranks gathered in the last pass of the same kind. Costs nothing, and allows prefetching
//   request  in rounds: every rank requests a page, and all ranks gather every requested page
// A pass is scripted if all ranks have the same script. A rank that needs another page than the next one of the script
// gathers the script's pages until its page has come or the script has ended, and then requests it. Ranks may therefore
// differ; that costs time, not correctness. Not thread-safe.
class GatherOrder {
 public:
  enum class Pass { training, evaluation };

  // The group is used by this object and its gathers only.
  explicit GatherOrder(Group group) : group_(std::move(group)) {}

  // 0 for none.
  static int64_t fingerprint(const std::vector<size_t>& pages);

  // Next page that all ranks gather. `want`: the page that this rank needs; call until it comes. None: this rank has
  // reached the point of begin(), end() or update(), and helps the others; call until the result is none, when all
  // ranks have reached it. Collective.
  std::optional<size_t> next(std::optional<size_t> want);
  // Next page of the script, to be prefetched; none without a script.
  std::optional<size_t> ahead();

  // Call when this rank has used a page that was not in memory or was only prefetched.
  void missed(size_t page) { missed_.push_back(page); }

  // Begins a pass. First call next() without `want`, and gather the pages that it returns, until it returns none: then
  // all ranks are here.
  void begin(Pass pass);
  // Ends the pass; the same holds. residue: a number that identifies the pages left in memory.
  void end(int64_t residue);
  // This rank is about to change its shards; the same holds, because other ranks may still read the old values.
  void update() { boundary_ = updates; }
  // Of passes that only some ranks make: a rank that does not make them, and those that do, behind their last one, say
  // so; the same holds. Passes of the others until then are as those of all ranks.
  void meet();
  // True if all ranks had the same residue at the end of the last pass.
  bool left_alike() const { return left_alike_; }

 private:
  enum Said : int64_t { begins_training = -1, begins_evaluation = -2, ended = -3, updates = -4, meets = -5 };

  static const char* text(int64_t said);
  struct Answer {
    int64_t said = ended;  // a page that the rank requests, or where it is: Said
    int64_t pages = 0;     // fingerprint of its script for the pass, or of the pages left
  };
  // By rank. Collective.
  std::vector<Answer> answers_to(const Answer& mine) const;
  // Whether all ranks have come to where `what` says that this one is.
  bool ask(int64_t what);
  void close();

  Group group_;
  std::vector<size_t> scripts_[2];  // by Pass
  std::vector<size_t> script_;      // of this pass; empty: asking
  size_t position_ = 0;
  std::optional<Pass> pass_;
  std::vector<size_t> missed_;  // pages of this pass, for the next script
  Said boundary_ = ended;       // what this rank says when it needs no page
  int64_t residue_ = 0;
  bool left_alike_ = true;
  std::deque<size_t> agreed_;  // requested by some rank, not gathered yet
};

}  // namespace shoal
