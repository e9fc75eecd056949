#pragma once
// Record of the order in which pages are used, pass by pass.

#include <optional>
#include <utility>
#include <vector>

#include "engine/paging/gather_order.h"

namespace shoal {

class UseOrder {
 public:
  using Pass = GatherOrder::Pass;
  struct Uses {
    std::vector<size_t> last;    // pages of the last pass of this kind; repeated uses in a row count once
    std::vector<size_t> before;  // pages of the pass before that
    bool changed() const { return !before.empty() && before != last; }
  };

  // Ends the previous pass, too.
  void begin(Pass pass) {
    end();
    pass_ = pass;
  }
  void end() {
    if (!pass_) return;
    auto& uses = passes_[static_cast<int>(*pass_)];
    uses.before = std::exchange(uses.last, std::exchange(now_, {}));
    pass_.reset();
  }
  void use(size_t page) {
    if (pass_ && (now_.empty() || now_.back() != page)) now_.push_back(page);
  }
  const Uses& of(Pass pass) const { return passes_[static_cast<int>(pass)]; }

 private:
  Uses passes_[2];
  std::optional<Pass> pass_;
  std::vector<size_t> now_;
};

}  // namespace shoal
