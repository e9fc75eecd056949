#pragma once
// Parameters that are exchanged together.

#include <string>
#include <vector>

#include "shoal/local_sgd.h"
#include "strategy/local_updates/mean.h"

namespace shoal {

class Fragment {
 public:
  struct Piece {
    std::string name;
    at::Tensor parameter;
    size_t param_group = 0;  // of the inner optimizer
    at::Tensor anchor{};     // theta; none where the mean of x is all that is needed
    at::Tensor momentum{};   // u; none for Averaging
    bool passed = false;     // what is on its way does not count for it
    double rate = 0;         // SlowMo: the inner optimizer's when the piece was sent
  };

  // `first_sent`: the first step, counted from the end of the warm-up, after which it is sent.
  Fragment(std::vector<Piece> pieces, int64_t first_sent, const LocalUpdatesOptions& options);

  // Whether it is sent after this step, counted from the end of the warm-up.
  bool due(int64_t step) const { return step >= first_sent_ && (step - first_sent_) % options_.every == 0; }
  // Whether an exchange is on its way after this step.
  bool under_way(int64_t step) const;

  // theta <- x.
  void anchor();
  void send(const Group& group, const torch::optim::Optimizer& optimizer, const Label& label);
  // Blocks until it is there.
  void apply(torch::optim::Optimizer& optimizer);

  const std::vector<Piece>& pieces() const { return pieces_; }
  std::vector<Piece>& pieces() { return pieces_; }
  Mean& mean() { return mean_; }

 private:
  std::vector<Piece> pieces_;
  int64_t first_sent_;
  LocalUpdatesOptions options_;
  Mean mean_;
};

}  // namespace shoal
