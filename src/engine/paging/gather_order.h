#pragma once
// Order of collective gathers: all ranks agree on the next page, although each rank knows only what its own graph will
// read.

#include <deque>
#include <optional>
#include <vector>

#include "shoal/group.h"

namespace shoal {

// A pass is one forward with its backward, or one forward without gradients. Gathers are collective; ranks agree on
// each, in one of two ways:
//   by script   what all of them gathered in the last pass of the kind. Costs nothing, and says what to fetch ahead
//   by asking   in rounds: every rank says what it wants, and all of them gather everything that anybody wants
// A pass is scripted when all ranks bring the same script. A rank that wants something else than the script's next page
// gathers the script's pages until what it wants has come, or the script has ended, and asks then. So ranks may differ;
// it costs time, not correctness. No thread-safety.
class GatherOrder {
 public:
  enum class Pass { training, evaluation };

  // The group is for this object and its gathers alone.
  explicit GatherOrder(Group group) : group_(std::move(group)) {}

  // 0 for none.
  static int64_t fingerprint(const std::vector<size_t>& pages);

  // The page that all ranks gather now. `want`: what this rank waits for; it calls until that comes. None: this rank
  // has come to where begin(), end() or update() has put it, and helps the others; it calls until it gets none, when
  // all have come there. Collective.
  std::optional<size_t> next(std::optional<size_t> want);
  // The script's next page, to be gathered ahead of use; none without script.
  std::optional<size_t> ahead();

  // This rank has come to a page that it did not have, or had got ahead.
  void missed(size_t page) { missed_.push_back(page); }

  // Begins a pass. next() without want first brings all ranks here: until it says none, gather what it says.
  void begin(Pass pass);
  // Ends it; the same holds. residue: a number that stands for what the pass leaves behind.
  void end(int64_t residue);
  // This rank is about to change its parts; the same holds: others may yet read what they are.
  void update() { boundary_ = updates; }
  // Whether all ranks had the same residue when the last pass ended.
  bool left_alike() const { return left_alike_; }

 private:
  enum Said : int64_t { begins_training = -1, begins_evaluation = -2, ended = -3, updates = -4 };

  static const char* text(int64_t said);
  void ask(int64_t what);
  void close();

  Group group_;
  std::vector<size_t> scripts_[2];  // by Pass
  std::vector<size_t> script_;      // of this pass; empty: asking
  size_t position_ = 0;
  std::optional<Pass> pass_;
  std::vector<size_t> missed_;  // in this pass
  Said boundary_ = ended;       // what this rank says where it wants nothing
  int64_t residue_ = 0;
  bool left_alike_ = true;
  std::deque<size_t> agreed_;  // wanted by somebody, not gathered yet
};

}  // namespace shoal
