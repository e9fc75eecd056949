#pragma once
// Assignment of a backward to one of several wrappers that share a parameter, such as two networks with one encoder.

#include <torch/types.h>

#include <cstdint>
#include <vector>

namespace shoal {

// A wrapper's forwards, as others with the same parameters see them. PyTorch's DistributedDataParallel goes by the
// same: it acts in a backward that follows a forward of its own. Thread-safe.
class ForwardTurns {
 public:
  // open: other wrappers may have the same parameters. apart: groups of ranks train values of their own (post-local
  // SGD).
  ForwardTurns(std::vector<at::Tensor> parameters, bool open, bool apart);
  ~ForwardTurns();
  ForwardTurns(const ForwardTurns&) = delete;
  ForwardTurns& operator=(const ForwardTurns&) = delete;

  // A forward that records a graph.
  void forward();
  void backward_ended();
  // Whether a gradient that begins a backward is of another wrapper: one with this parameter has run a forward since
  // this one's last, and this one's was followed by a backward.
  bool is_others(const at::Tensor& parameter) const;
  // Whether several wrappers have this parameter.
  static bool are_shared(const at::Tensor& parameter);
  // Whether a wrapper has this parameter; with `open`, one that is not open.
  static bool are_taken(const at::Tensor& parameter, bool open);
  // Whether a wrapper has this parameter by which groups of ranks train it apart.
  static bool are_apart(const at::Tensor& parameter);

 private:
  // Whether `which` holds for one of the wrappers that have this parameter.
  template <class Which>
  static bool is_any(const at::Tensor& parameter, const Which& which);

  std::vector<at::Tensor> parameters_;
  bool open_;
  bool apart_;
  int64_t last_ = 0;  // number of the last forward, among those of all wrappers
  bool pending_ = false;
};

}  // namespace shoal
