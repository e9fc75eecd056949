#pragma once
// Assignment of a backward to one of several wrappers that share a parameter, such as two networks with one encoder.

#include <torch/types.h>

#include <cstdint>
#include <vector>

namespace shoal {

// A wrapper's forwards, as others with the same parameters see them. PyTorch's DistributedDataParallel goes by the same: it acts
// in a backward that follows a forward of its own. Thread-safe.
class ForwardTurns {
 public:
  // open: other wrappers may have the same parameters.
  ForwardTurns(std::vector<at::Tensor> parameters, bool open);
  ~ForwardTurns();
  ForwardTurns(const ForwardTurns&) = delete;
  ForwardTurns& operator=(const ForwardTurns&) = delete;

  // A forward that records a graph.
  void forward();
  void backward_ended();
  // Whether a gradient that begins a backward is of another wrapper: one with this parameter has run a forward since this one's
  // last, and this one's was followed by a backward.
  bool is_others(const at::Tensor& parameter) const;
  // Whether several wrappers have this parameter.
  static bool are_shared(const at::Tensor& parameter);
  // Whether a wrapper has this parameter; with `open`, one that is not open.
  static bool are_taken(const at::Tensor& parameter, bool open);

 private:
  std::vector<at::Tensor> parameters_;
  bool open_;
  int64_t last_ = 0;  // number of the last forward, among those of all wrappers
  bool pending_ = false;
};

}  // namespace shoal
