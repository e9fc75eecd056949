#pragma once
// Comparison of first and second owners of shards, before an update.

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "optim/state.h"
#include "shoal/group.h"

namespace shoal {

// DisagreeError: some ranks have not updated in a step in which others have.
[[noreturn]] void refuse_unequal_updates();

// Comparison of the two owners of each shard before an update: what this rank has. Numbers are of 64 bits, of which the
// upper 53 are compared.
struct SecondOwnerCheck {
  std::map<int, uint64_t> shards{};  // by first owner, digest of what this rank has of a shard that it owns
  // The same of its gradient, where they are compared.
  std::optional<std::map<int, uint64_t>> gradients{};
  uint64_t options = 0;   // digest of the optimizer's
  int64_t updates = 0;    // that it has made
  bool asks = false;      // for what the caller knows
  bool replaced = false;  // the optimizer's state, here and past the job's updates

  // Adds the bits of an element to the digest of an owner's shard, of another one in each step.
  void add_element(int owner, const at::Tensor& values);
  // The same of each tensor of the state, and its numbers.
  void add_state(int owner, const NamedState& state);
  // Adds all elements; undefined: there is none.
  void add_gradient(int owner, const at::Tensor& gradient);
  struct Answer {
    bool asked = false;            // by some rank
    std::optional<int> differs{};  // the first owner whose second one has another gradient
  };
  // owners: choose_second_owners(). On all ranks: UsageError if one's state was replaced; DisagreeError if the two
  // owners of a shard have other digests, or ranks other options or numbers of updates. Collective.
  Answer ask(const Group& group, const std::vector<int>& owners, const Label& label) const;
};

}  // namespace shoal
