#pragma once
// Gradients in buckets, as tensors that a program may keep.

#include <torch/types.h>

#include <vector>

#include "engine/buckets/bucket_plan.h"

namespace shoal {

// grad() lies in a bucket, whose memory each step overwrites. A program may have kept the tensor (in a list for
// clipping, or a clone that it forgot to make), or have given grad() memory of its own (a part of a flat tensor).
class ShownGradients {
 public:
  explicit ShownGradients(size_t gradients) : shown_(gradients), elsewhere_(gradients), graph_(gradients) {}

  // Call before autograd adds to grad(). bucket: the gradient's, flat. Notes whether grad() lies in memory that other
  // tensors have, too, and returns it; the gradient stays there then.
  bool note(size_t gradient, const at::Tensor& grad, const at::Tensor& bucket);
  // The same for all gradients, after buckets were rebuilt and the former ones destroyed.
  void note_all(const std::vector<Gradient>& gradients);
  bool elsewhere(size_t gradient) const { return elsewhere_[gradient]; }
  // Makes grad() the elements of `view`. A tensor that the program keeps stays the gradient's, with other memory.
  void show(size_t gradient, at::Tensor& grad, const at::Tensor& view);
  // Call when the last backward's gradients have been looked at. Those that are shown next are of another one.
  void end_backward() { ended_ = true; }
  // Whether grad() was shown in the last backward.
  bool was_shown(size_t gradient) const { return shown_[gradient] == backward_; }

  // Whether autograd has given grad() a graph (backward() with create_graph), which the mean over ranks has not.
  void note_graph(size_t gradient, const at::Tensor& grad) {
    graph_[gradient] = grad.defined() && grad.requires_grad();
  }
  // A backward through such a grad() is an error from now on, where a graph of this rank's gradient, or none, would
  // give wrong numbers.
  void end_graphs(const std::vector<Gradient>& gradients);

 private:
  int64_t backward_ = 1;
  bool ended_ = false;
  std::vector<int64_t> shown_;  // by gradient: the last backward in which it was
  std::vector<bool> elsewhere_;
  std::vector<bool> graph_;
};

}  // namespace shoal
