#pragma once
// Trailer of a step: flags and a weight that ranks sum with the gradients.

#include <torch/types.h>

#include <vector>

namespace shoal {

// One flag per gradient and a weight, in memory that is summed over the ranks:
//   flags    1 if this rank used the gradient in the step, `came_alone` if backward reached it and added nothing
//            (an undefined gradient); the sum counts the ranks that used it
//   forwards 1 if this rank has dropped a forward since the last step, `used_all` if its backward has used them all
//   weight   this rank's weight in the mean; the gradients' sum is divided by the sum of weights
// So unused parameters, weights, abandoned steps (a weight of NaN) and ranks that are a step behind need no
// communication of their own.
class StepTrailer {
 public:
  StepTrailer() = default;
  // memory: numel(of.size()) elements.
  StepTrailer(std::vector<size_t> of, at::Tensor memory) : of_(std::move(of)), memory_(std::move(memory)) {}

  static int64_t numel(size_t gradients) { return static_cast<int64_t>(gradients) + 2; }
  bool defined() const { return memory_.defined(); }
  const at::Tensor& memory() const { return memory_; }
  // Whether this dtype holds a weight exactly: 16-bit floats cannot count tokens.
  bool exact() const { return memory_.element_size() >= 4; }

  enum class Forwards { unknown, dropped, used };

  // came: whether backward reached the gradient.
  void write(const std::vector<bool>& used, const std::vector<bool>& came, Forwards forwards, double weight);
  double weight() const;
  // Whether some of `ranks` ranks have dropped a forward, and others have used all of theirs, as far as this dtype
  // tells.
  bool some_are_behind(int ranks) const;
  // Whether all `ranks` ranks used the same gradients.
  bool same_on_all(int ranks) const;
  // Sets used[i] if any rank used gradient i, came[i] if any rank's backward reached it.
  void read(std::vector<bool>& used, std::vector<bool>& came) const;

 private:
  // Small enough that its sum over all ranks is not mistaken for 1, even in 16 bits.
  static constexpr double came_alone = 1.0 / (1 << 14);
  static constexpr double used_all = came_alone;

  std::vector<size_t> of_;
  at::Tensor memory_;
};

}  // namespace shoal
