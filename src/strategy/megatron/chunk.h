#pragma once
// One chunk of a model: its gradient buffers and its parameter buffers.

#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/first_touch.h"
#include "engine/parameter_buffer.h"
#include "engine/reducer.h"
#include "engine/sharded_state.h"
#include "shoal/strategy/megatron/distributed_optimizer.h"

namespace shoal {

// A piece of a parameter that this rank owns.
struct OwnedPiece {
  size_t gradient = 0;  // number in the chunk
  at::Tensor model;     // its elements in the parameter buffer, one-dimensional
  at::Tensor main;      // what the optimizer updates: `model` itself as a leaf, or a float32 copy of it
  at::Tensor sum;       // its elements in the gradient buffer
  bool whole = false;

  bool copied() const { return main.scalar_type() != model.scalar_type(); }
};

class Chunk {
 public:
  // Gives everybody rank 0's values, then moves parameters into buffers. `cut`: equal ranges of each buffer, else whole
  // parameters. Collective.
  Chunk(const std::shared_ptr<torch::nn::Module>& module, const Group& group,
        const DistributedOptimizerOptions& options, bool cut);

  Reducer& reducer() { return *reducer_; }
  const Reducer& reducer() const { return *reducer_; }
  std::vector<OwnedPiece>& pieces() { return pieces_; }
  const std::vector<std::unique_ptr<ParameterBuffer>>& buffers() const { return buffers_; }

  // This rank's ranges are new; those that forward needs first leave first.
  void publish(const Label& label);
  // Waits for everybody's ranges; `at_first_touch`: for a buffer's when an operator first takes one of its parameters.
  void wait(const Label& label, bool at_first_touch);
  // The gradient's place in its buffer, undefined where the buffer has no memory; none for another chunk's parameter.
  std::optional<at::Tensor> main_grad(const at::Tensor& parameter) const;
  std::vector<ParameterRange> ranges(int rank) const;
  // All ranks' pieces, those of a parameter together; names begin with `prefix`.
  std::vector<StatePiece> state_pieces(const std::string& prefix) const;

 private:
  void list_pieces();

  Group group_;
  std::unique_ptr<Reducer> reducer_;
  std::vector<std::unique_ptr<ParameterBuffer>> buffers_;  // by bucket of the reducer
  std::vector<OwnedPiece> pieces_;
  Label awaited_;
  FirstTouch first_touch_{[this](size_t buffer) { buffers_[buffer]->wait(awaited_); }};
};

}  // namespace shoal
