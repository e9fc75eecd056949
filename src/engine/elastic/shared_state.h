#pragma once
// Optimizer state of all ranks of a host in one file of shared memory.

#include <torch/optim/optimizer.h>

#include <optional>
#include <vector>

#include "engine/elastic/held_state.h"
#include "engine/elastic/update_record.h"
#include "shoal/group.h"

namespace shoal {

// For each rank an UpdateRecord and a scratch, for each target an entry and slots for its state. Every rank writes its
// own part; that of a rank which has ended is written by the rank that acts for it. The memory outlives each of the
// ranks, and takes pages only where it is written: a slot has room for any state up to 8 bytes per element.
class SharedState : public HeldState {
 public:
  // scratch_numel: the most elements of a target that are saved at once. Collective. UsageError if ranks do not share
  // memory.
  SharedState(const Group& group, UpdateTargets targets, int64_t scratch_numel);

  const UpdateTargets& targets() const override { return targets_; }
  UpdateRecord& record(int rank) const;
  UpdateInputs& inputs(int rank, size_t target) const;
  StateEntry& entry(int rank, size_t target) const;
  std::byte* scratch(int rank) const { return at(ranks_[static_cast<size_t>(rank)].scratch); }

  // The state's tensors, in their slots, and its numbers; nothing if there is none.
  std::optional<NamedState> state(int rank, size_t target) const override;
  // The memory of field `field`.
  std::byte* slot_data(int rank, size_t target, int field) const {
    return at(ranks_[static_cast<size_t>(rank)].slots[target] + field * slot_bytes(rank, target));
  }
  // A tensor in the slot of field `field`.
  at::Tensor slot(int rank, size_t target, int field, at::ScalarType dtype, at::IntArrayRef sizes) const;
  // Number of the field of this name: one that there is, or a new one. Counts `fresh` up with a new one.
  int field_of(int rank, size_t target, const std::string& name, int& fresh) const;
  // Describes a state whose tensors lie in their slots already. sizes: those of the whole tensors.
  struct Described {
    int field;
    std::string name;
    at::ScalarType dtype;
    std::vector<int64_t> sizes;
  };
  void describe(int rank, size_t target, const std::vector<Described>& fields,
                const std::map<std::string, double>& numbers) const;
  // Copies a state to the slots and describes it. UsageError for one that does not fit.
  void keep(int rank, size_t target, const NamedState& state) const;

 private:
  struct Part {
    int64_t record = 0;
    int64_t inputs = 0;
    int64_t entries = 0;
    int64_t scratch = 0;
    std::vector<int64_t> slots{};  // by target, the first of its slots
  };

  std::byte* at(int64_t offset) const { return data_ + offset; }
  int64_t slot_bytes(int rank, size_t target) const;

  UpdateTargets targets_;
  std::vector<Part> ranks_;
  at::Tensor memory_;
  std::byte* data_ = nullptr;
};

}  // namespace shoal
