#pragma once
// Optimizer state whose pieces lie on different ranks, to and from its whole, name-keyed form.

#include <torch/nn/module.h>

#include <optional>
#include <string>
#include <vector>

#include "shoal/detail/range.h"
#include "shoal/group.h"
#include "shoal/optimizer_state.h"
#include "shoal/precision.h"

namespace shoal {

// Name under which OptimizerState has the float32 copy of a 16-bit parameter.
inline constexpr const char* main_param = "main_param";

// A piece of a parameter and its state. All ranks list all pieces in one order, those of a parameter together.
struct StatePiece {
  std::string name;      // of the parameter
  at::Tensor parameter;  // for its shape and strides
  Range range;           // elements, in the order in which they lie in the parameter's memory
  int owner = 0;         // rank of the group
  at::Tensor updated{};  // on the owner: what its optimizer updates
  bool main = false;     // `updated` is a float32 copy, and belongs to the state
  at::Tensor current{};  // values to save, where they are not those of `updated`

  at::Tensor values() const { return current.defined() ? current : updated.detach(); }

  bool whole() const { return range.size() == parameter.numel(); }
};

// The whole state on `recipient` (none: on every rank), elsewhere empty. Moves one tensor at a time, or several small
// ones of a parameter, so that no rank but the recipients holds more beside its own. Collective.
OptimizerState gather_state(const Group& group, const std::vector<StatePiece>& pieces,
                            const torch::optim::Optimizer& local, std::optional<int> recipient);

// What OptimizerState keeps under grad_scaler_key.
NamedState scaler_state(const GradScaler& scaler);

// This rank's pieces of `state` go into `local`, and the scaler's state into `scaler`; a warning where only one of the
// two is there. UsageError that names the parameter for entries that are missing, extra or of another shape, and for
// values that `local` does not keep; nothing has changed then. Not collective.
void load_state(int rank, const std::vector<StatePiece>& pieces, torch::optim::Optimizer& local,
                const OptimizerState& state, StateDtypes dtypes, GradScaler* scaler = nullptr);

// UsageError for state of another shape than its parameter's, which an element-wise optimizer never has.
void require_shapes(const std::vector<StatePiece>& pieces, const OptimizerState& state);

// UsageError with the advice if the optimizer's state lies on several ranks: its own state() is empty.
void refuse_sharded(const torch::optim::Optimizer& optimizer, const std::string& advice);

// A whole optimizer as pieces of one rank, 0; names come from the module.
std::vector<StatePiece> pieces_of(const torch::optim::Optimizer& optimizer, const torch::nn::Module& module);

}  // namespace shoal
