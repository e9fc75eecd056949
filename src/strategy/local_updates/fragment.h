#pragma once
// Fragment of the model: parameters that are averaged together.

#include <string>
#include <vector>

#include "shoal/local_updates.h"
#include "strategy/local_updates/mean.h"

namespace shoal {

class Fragment {
 public:
  struct Piece {
    std::string name;
    at::Tensor parameter;
    size_t param_group = 0;  // index of the inner optimizer's param group
    at::Tensor anchor{};     // theta; undefined if the mean of x suffices
    at::Tensor momentum{};   // u; undefined for Averaging
    bool passed = false;     // true if the running exchange must not be applied to this piece
    double rate = 0;         // SlowMo: the inner optimizer's learning rate when the piece was sent
  };

  // first_sent: the first step, counted from the end of the warm-up, after which the fragment is sent.
  Fragment(std::vector<Piece> pieces, int64_t first_sent, const LocalUpdatesOptions& options);

  // Whether the fragment is sent after this step, counted from the end of the warm-up.
  bool due(int64_t step) const { return step >= first_sent_ && (step - first_sent_) % options_.every == 0; }
  // Whether an exchange is in flight after this step.
  bool under_way(int64_t step) const;

  // theta <- x.
  void anchor();
  // Before send(), but not before a repetition of it: takes the inner optimizer's learning rates, which a schedule may
  // have changed on some ranks since.
  void note_rates(const torch::optim::Optimizer& optimizer);
  void send(const Group& group, const Label& label);
  // Waits for the exchange, and applies it.
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
